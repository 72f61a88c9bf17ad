# SPDX-License-Identifier: Apache-2.0
"""A training step of QKFormer at T=4 next to SpikingJelly 2's own: time and peak memory.

    python benchmarks/qkformer_step.py
    python benchmarks/qkformer_step.py --batch 8 --rounds 12 --profile
    python benchmarks/qkformer_step.py --device cuda --batch 32 --side 224 --depths 1 2 7

ImageNet stem, widths 96, 192 and 384, blocks 1, 1 and 2. Times are taken in turns in one process,
and a ratio of times is given where a paired test shows a difference (1 % for both): n.d. is not
distinguishable, busy is a machine that was too busy to tell, few is less than ten rounds. Peak
memory is the growth of a fresh process over two steps; on CUDA what PyTorch's allocator grows by
over one. ``one by one`` is ours with the parts of a step called one after the other, which keeps
what PyTorch keeps; so does ours under autocast (``--bfloat16``).
"""

from __future__ import annotations

import argparse
import contextlib
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import keymix
from keymix.analysis.measure import timed
from keymix.analysis.memory import MIB
from keymix.analysis.memory_growth import peak_bytes
from keymix.analysis.timing import Samples, Turns, compare, quartiles
from keymix.layers.spiking_block import plain_steps
from keymix.models.qkformer import QKFormer
from measured import device_name

THEIRS, OURS, PARTS = "SpikingJelly", "keymix", "keymix, one by one"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a step is taken of.

    Args:
        batch: Images a step.
        side: Pixels of an image.
        dim: Width of the last stage.
        depths: Blocks of the stages.
        device: Where it runs.
        bfloat16: Whether autocast chooses bfloat16.
    """

    batch: int = 4
    side: int = 128
    dim: int = 384
    depths: tuple[int, int, int] = (1, 1, 2)
    device: str = "cpu"
    bfloat16: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """What is compared: under autocast ours calls the parts one by one anyway."""
        return (THEIRS, OURS) if self.bfloat16 else (THEIRS, OURS, PARTS)


def training_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    images: Tensor,
    labels: Tensor,
    *,
    bfloat16: bool = False,
) -> Callable[[], None]:
    """Return what takes a training step of a classifier."""

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(images.device.type, torch.bfloat16, enabled=bfloat16):
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()

    return step


class FromRest(nn.Module):
    """A SpikingJelly model whose neurons start each call from rest."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Reset the neurons and run the model."""
        from spikingjelly.activation_based import functional

        functional.reset_net(self.model)
        out: Tensor = self.model(x)
        return out


def qkformer(name: str, *, side: int, dim: int, depths: tuple[int, int, int]) -> nn.Module:
    """Build the model of either library, T=4, six heads."""
    if name != THEIRS:
        return QKFormer(img_size=side, embed_dim=dim, depths=tuple(depths), num_heads=6)
    from spikingjelly.activation_based.model import qkformer as theirs

    heads = (6, 6, 6)
    return FromRest(
        theirs.QKFormer(
            T=4, embed_dims=dim, depths=tuple(depths), num_heads=heads, detach_reset=True
        )
    )


def trainer(name: str, setting: Setting) -> Callable[[], None]:
    """Build a model and return what takes a training step of it."""
    torch.manual_seed(0)
    side = setting.side
    model = qkformer(name, side=side, dim=setting.dim, depths=setting.depths)
    model.to(setting.device)
    images = torch.randn(setting.batch, 3, side, side, device=setting.device)
    labels = torch.randint(0, 1000, (setting.batch,), device=setting.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    take = training_step(model, optimizer, images, labels, bfloat16=setting.bfloat16)

    def step() -> None:
        with plain_steps() if name == PARTS else contextlib.nullcontext():
            take()

    return step


def times(setting: Setting, rounds: int) -> dict[str, Samples]:
    """Time the steps in turns."""
    device = torch.device(setting.device)
    turns = Turns({name: timed(trainer(name, setting), device) for name in setting.names})
    for _ in range(rounds):
        turns.round()
    return turns.samples


def convolutions(name: str, setting: Setting) -> tuple[float, float]:
    """Milliseconds a step spends in convolutions, and in all operators, in PyTorch's profiler."""
    step = trainer(name, setting)
    step()
    with torch.profiler.profile() as profile:
        step()
    times = {each.key: each.self_cpu_time_total / 1e3 for each in profile.key_averages()}
    return sum(ms for key, ms in times.items() if "convolution" in key), sum(times.values())


def resident() -> float:
    """Peak of this process so far, MiB (Linux)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def peak(name: str, setting: Setting) -> float:
    """Peak memory of a step beyond the weights, MiB; on a CPU the growth of a fresh process."""
    if torch.device(setting.device).type == "cuda":
        return peak_bytes(trainer(name, setting), torch.device(setting.device)) / MIB
    sizes = ["--batch", str(setting.batch), "--side", str(setting.side)]
    sizes += ["--depths", *map(str, setting.depths), *(["--bfloat16"] if setting.bfloat16 else [])]
    command = [sys.executable, __file__, *sizes, "--peak-of", name]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=4, help="images per step (default 4)")
    parser.add_argument("--side", type=int, default=128, help="pixels of an image (default 128)")
    parser.add_argument("--depths", type=int, nargs=3, default=(1, 1, 2), help="blocks a stage")
    parser.add_argument("--device", type=device_name, default="cpu")
    parser.add_argument("--bfloat16", action="store_true", help="under autocast")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--profile", action="store_true", help="time in convolutions as well")
    parser.add_argument("--peak-of", choices=(THEIRS, OURS, PARTS), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    setting = Setting(
        batch=args.batch,
        side=args.side,
        depths=tuple(args.depths),
        device=args.device,
        bfloat16=args.bfloat16,
    )
    if args.peak_of:
        step = trainer(args.peak_of, setting)
        before = resident()
        step()
        step()
        print(resident() - before)
        return 0
    precision = "bfloat16 autocast" if args.bfloat16 else "float32"
    print(
        f"keymix {keymix.__version__}, torch {torch.__version__}, {precision}, {args.device}, "
        f"{torch.get_num_threads()} threads, batch {args.batch}, {args.side} pixels, "
        f"{args.rounds} rounds\n"
    )
    peaks = {name: peak(name, setting) for name in setting.names}
    samples = times(setting, args.rounds)
    line = "{:<20} {:>9} {:>16} {:>6} {:>9} {:>6}"
    print(line.format("step of", "median s", "[quartiles]", "ratio", "peak MiB", "ratio"))
    base = samples[THEIRS]
    for name in setting.names:
        low, middle, high = quartiles(samples[name].kept())
        paired = compare(base, samples[name], comparisons=len(setting.names) - 1)
        print(
            line.format(
                name,
                f"{middle:.2f}",
                f"[{low:.2f}, {high:.2f}]",
                "1.00" if name == THEIRS else paired.ratio_text(),
                f"{peaks[name]:.0f}",
                f"{peaks[name] / peaks[THEIRS]:.2f}",
            )
        )
    for name in (THEIRS, OURS) if args.profile else ():
        part, total = convolutions(name, setting)
        print(f"{name}: {part:.0f} of {total:.0f} ms of a profiled step in convolutions")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
