# SPDX-License-Identifier: Apache-2.0
"""Make keymix's own comparison of the CIFAR-10 runs that came back from the GPU.

    python benchmarks/gpu_queue/cifar10_report.py docs/results/gpu/cifar10 OUT --model vit_small

The first folder holds ``MODEL/MIXER/SEED/summary.json`` and the other small files of each run. OUT
becomes a comparison's folder with report, tables and ``results.json``; the weights stayed on the
machine, so there are no attention maps.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # where `gpu_queue` lies

from gpu_queue.jobs.cifar10 import BASELINE, FIRST, MIXERS, MODELS, SEEDS
from gpu_queue.training import PREDICTIONS, TEXTS

if TYPE_CHECKING:
    from keymix.compare.run import Comparison


def assemble(kept: Path, out: Path, model: str = FIRST) -> Comparison:
    """Lay a model's runs out as a comparison, and let keymix tell of it.

    Args:
        kept: Small files of the runs, below ``MODEL/MIXER/SEED``.
        out: A folder that is not there yet.
        model: One of the job's.

    Returns:
        The comparison; missing runs are listed as such.

    Raises:
        ValueError: If no run of the baseline is there.
    """
    from dataclasses import replace

    import torch

    from keymix.compare.folder import write_manifest
    from keymix.compare.plan import Plan, PlannedMixer
    from keymix.compare.run import rebuild
    from keymix.mixers.spec import parse_mixer
    from keymix.train.files import read_json
    from keymix.train.folder import read_summary
    from keymix.train.model import build_model
    from keymix.train.recipe import from_record

    there = {
        (mixer, seed): folder
        for mixer in MIXERS
        for seed in SEEDS
        if ((folder := kept / model / mixer / str(seed)) / "summary.json").is_file()
    }
    first = next((folder for (mixer, _), folder in there.items() if mixer == BASELINE), None)
    if first is None:
        raise ValueError(f"{str(kept / model)!r} holds no finished run of {BASELINE}")
    data = read_summary(first).data
    recipe = from_record(read_json(first / "recipe.json"))
    sizes = {
        "num_classes": len(data.classes),
        "in_chans": data.in_chans,
        "image_size": data.image_size,
    }
    with torch.device("meta"):
        pooling = getattr(build_model(recipe, **sizes), "global_pool", "") or "token"
    mixers = [mixer for mixer in MIXERS if any(name == mixer for name, _ in there)]
    plan = Plan(
        recipe=replace(recipe, model=replace(recipe.model, mixer=None), seed=0),
        mixers=tuple(
            PlannedMixer(
                label=mixer,
                slug=parse_mixer(mixer).slug,
                control=False,
                mixes_prefix=True,
                params=next(
                    read_summary(folder).params
                    for (name, _), folder in there.items()
                    if name == mixer
                ),
            )
            for mixer in mixers
        ),
        seeds=tuple(sorted({seed for _, seed in there})),
        baseline=BASELINE,
        match=None,
        pooling=str(pooling),
        unheard=(),
        command=f"keymix compare --recipe {recipe.name} --mixers {','.join(mixers)} --no-controls",
        processes=1,
        threads=1,
        out=out,
    )
    write_manifest(plan, data)
    for mixer in plan.mixers:
        for seed in plan.seeds:
            if (mixer.label, seed) in there:
                folder = plan.folder(mixer, seed)
                folder.mkdir(parents=True)
                for name in (*TEXTS, PREDICTIONS):
                    shutil.copy(there[mixer.label, seed] / name, folder / name)
    return rebuild(out)


def main() -> None:
    """Read the command line and print where the report is."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kept", type=Path, metavar="KEPT")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--model", choices=[*MODELS], default=FIRST)
    given = parser.parse_args()
    made = assemble(given.kept, given.out, given.model)
    for note in made.notes:
        print(note, file=sys.stderr)
    print(made.report)


if __name__ == "__main__":
    sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "src"))
    main()
