# SPDX-License-Identifier: Apache-2.0
"""Python in the documents runs as it stands."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from runpy import run_path

import pytest
from documents import DOCS, DOCUMENTS, ROOT, Block, blocks

WITH_PYTHON = [
    path for path in DOCUMENTS if any(block.language == "python" for block in blocks(path))
]

# Runs a document's blocks one after the other in one namespace; each stands on its own line count,
# so that a traceback names the line of the document. Every document gets a process that has read
# other people's libraries and nothing of ours.
_DRIVER = """
import json, os, sys, traceback
import lightning_fabric, matplotlib.pyplot, numpy, timm, torch
import torchvision.transforms.v2
torch.set_num_threads(1)  # other tests compute at the same time
for request in sys.stdin:
    handed, folder, log = json.loads(request)
    child = os.fork()
    if not child:
        code = 1
        try:
            os.chdir(folder)
            said = os.open(log, os.O_WRONLY | os.O_CREAT)
            os.dup2(said, 1), os.dup2(said, 2)
            namespace = {"__name__": "__main__"}
            for path, line, text in handed:
                exec(compile("\\n" * line + text, path, "exec"), namespace)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
os._exit(0)  # to take everything down takes seconds
"""


@pytest.fixture(scope="module")
def driver() -> Iterator[subprocess.Popen[str]]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", _DRIVER], **pipes) as process:
        yield process
        process.stdin.close()


def run_blocks(driver: subprocess.Popen[str], chosen: list[Block], folder: Path) -> tuple[str, str]:
    """Run blocks in a folder; returns the exit status and what was printed."""
    handed = [(str(b.path), b.line, b.text) for b in chosen]
    message = folder.parent / f"{folder.name}.txt"
    driver.stdin.write(json.dumps([handed, str(folder), str(message)]) + "\n")
    driver.stdin.flush()
    return driver.stdout.readline().strip(), message.read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("path", WITH_PYTHON, ids=lambda path: str(path.relative_to(ROOT)))
def test_python_blocks_run_in_order(
    path: Path, tmp_path: Path, driver: subprocess.Popen[str]
) -> None:
    chosen = [b for b in blocks(path) if b.language == "python" and b.not_run is None]
    status, output = run_blocks(driver, chosen, tmp_path)
    assert status == "0", output


@pytest.mark.slow
def test_a_block_that_fails_is_reported_with_its_line(
    tmp_path: Path, driver: subprocess.Popen[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n```python\nx = 1\nraise LookupError(x)\n```\n", encoding="utf-8")
    status, output = run_blocks(driver, blocks(page), tmp_path)
    assert status == "1"
    assert 'page.md", line 5' in output


def test_blocks_that_are_not_run_say_why() -> None:
    silent = [
        str(block)
        for path in DOCUMENTS
        for block in blocks(path)
        if block.not_run is not None and len(block.not_run.split()) < 3
    ]
    assert not silent, f"<!-- not run: … --> needs a reason: {silent}"


@pytest.mark.parametrize("what", ["mixer", "task"])
def test_the_page_on_ones_own_shows_the_example_file(what: str) -> None:
    shown = [b.text for b in blocks(DOCS / f"own-{what}.md") if b.language == "python"]
    example = (DOCS / "examples" / f"my_{what}.py").read_text(encoding="utf-8")
    assert example in shown


@pytest.mark.parametrize("name", ["mechanisms", "rooms"])
def test_a_figure_is_what_its_script_draws(name: str) -> None:
    drawn = run_path(str(DOCS / "figures" / f"{name}.py"))["figure"]()
    kept = (DOCS / "figures" / f"{name}.svg").read_text(encoding="utf-8")
    assert kept == drawn, f"run docs/figures/{name}.py"


# after docs/papers.md: what its lines make is what it says of the authors' code
ALIGNED = """
import copy

place = {"dim": 12, "num_heads": 3, "grid": (2, 3), "num_prefix_tokens": 1}
lsa = {"temperature": True, "mask_diagonal": True}
ours = keymix.create_mixer("cska", **place, **lsa).double()
ours.temperature.data.fill_(0.3)
rows = keymix.create_mixer("their_rows", **place, **lsa).double()
rows.load_state_dict(ours.state_dict())
x = torch.randn(2, 7, 12, dtype=torch.float64)
inputs = ours.inputs(x, (2, 3))
logits = ours.logits(inputs, (2, 3))
logits = torch.cat((logits[:, :, 1:], logits[:, :, :1] * ours.temperature.exp()), 2)
logits[:, :, range(7), range(7)] = -torch.inf
byhand = ours.output(logits.softmax(-1) @ inputs["v"], x)
assert torch.allclose(rows(x), byhand) and not torch.allclose(rows(x), ours(x))

read, seen = torch.randn(2, 5, 128), cait.blocks_token_only[0].norm1
assert torch.equal(seen(read)[:, 1:], read[:, 1:])
nn.init.normal_(seen.weight)
nn.init.normal_(cait.head.weight)
for block in cait.blocks_token_only:
    nn.init.constant_(block.gamma_1, 1.0)
plain, image = copy.deepcopy(cait.eval()), torch.randn(2, 3, 32, 32)
for block in plain.blocks_token_only:
    whole = nn.LayerNorm(block.norm1.normalized_shape, eps=block.norm1.eps)
    whole.load_state_dict(block.norm1.state_dict())
    block.norm1 = whole
assert not torch.allclose(plain(image), cait(image))

norm, fc = swin.eval().head.fc
nn.init.normal_(norm.weight)
nn.init.normal_(fc.weight)
tokens = swin.forward_features(image)
assert torch.allclose(swin(image), fc(norm(tokens.mean((1, 2)))), atol=1e-5)
assert not torch.allclose(swin(image), fc(norm(tokens).mean((1, 2))), atol=1e-3)
"""


@pytest.mark.slow
def test_the_lines_on_the_authors_code_do_what_the_page_says(
    tmp_path: Path, driver: subprocess.Popen[str]
) -> None:
    page = tmp_path / "aligned.md"
    page.write_text(f"```python\n{ALIGNED}```\n", encoding="utf-8")
    given = [b for b in blocks(DOCS / "papers.md") if b.language == "python"]
    status, output = run_blocks(driver, [*given, *blocks(page)], tmp_path)
    assert status == "0", output


def test_the_screens_are_what_their_script_draws() -> None:
    drawn = run_path(str(DOCS / "figures" / "terminal.py"))["page"]()
    assert (DOCS / "terminal.md").read_text(encoding="utf-8") == drawn
