# SPDX-License-Identifier: Apache-2.0
"""What a study of cost leaves: rows of tables, measurements, and the record. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from keymix.analysis.timing import Verdict

BASELINE = "softmax"
"""What the others' latency and memory are given in multiples of."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """At which sizes mixers were looked at, and how they were measured.

    Attributes:
        dim: Width D of the tokens.
        num_heads: Heads.
        at: Tokens N of the tables of formulas.
        tokens: Tokens at which latency and memory are measured.
        sweep_tokens: Tokens of the left half of the figure.
        sweep_dims: Widths of its right half.
        repeats: Rounds behind a median.
        batch_size: Images per batch, for memory and images per second.
        device: Where.
        threads: CPU threads within an operation.
        time_steps: Steps T of spiking mixers.
    """

    dim: int
    num_heads: int
    at: int
    tokens: tuple[int, ...]
    sweep_tokens: tuple[int, ...]
    sweep_dims: tuple[int, ...]
    repeats: int
    batch_size: int
    device: str
    threads: int
    time_steps: int


@dataclass(frozen=True, kw_only=True)
class MixerRow:
    """A mixer of the study.

    Attributes:
        label: How it is written.
        name: Its canonical name.
        domain: ``"dense"`` or ``"spiking"``.
        control: Whether it is a control.
        reason: Why it could not be counted at the tables' site; None if it was.
    """

    label: str
    name: str
    domain: str
    control: bool
    reason: str | None


@dataclass(frozen=True, kw_only=True)
class RatioPoint:
    """SKA Fig. 4: multiply-adds per parameter of a mixer without biases.

    Attributes:
        mixer: Its label.
        tokens: N.
        dim: D.
        params: Trainable parameters, with biases that no option switches off; None if unknown.
        macs: Multiply-adds; None if unknown.
        ratio: Multiply-adds per parameter; None without parameters.
        reason: Why there is no ratio; None if there is.
    """

    mixer: str
    tokens: int
    dim: int
    params: int | None
    macs: int | None
    ratio: float | None
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class WeightRow:
    """SKA Table 7 for a mixer, read off its operations.

    Attributes:
        mixer: Its label.
        sharing: ``"spatially global"`` where a learned kernel slides over the grid, else ``"no"``.
        kernels: Sizes of such kernels.
        dynamic: Matrix products both of whose factors the tokens give.
        params_a_token: Parameters that one more token adds, on average from the fewest to the most
            tokens of the figure; None if they could not be counted.
        reason: Why nothing was read off; None if it was.
    """

    mixer: str
    sharing: str | None = None
    kernels: tuple[str, ...] = ()
    dynamic: int | None = None
    params_a_token: int | float | None = None
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class ScalingRow:
    """What one mixer took at one number of tokens, or why it was not measured.

    Attributes:
        mixer: Its label.
        tokens: Tokens N.
        grid: Rows and columns they lie on.
        params: Trainable parameters; None if they could not be counted.
        macs: Multiply-adds; None if they could not be counted.
        activation_bytes: Bytes kept for the backward pass of one image; None if not counted.
        latency_ms: Median time of a forward pass of one image, milliseconds.
        latency_q1_ms: First quartile.
        latency_q3_ms: Third quartile.
        latency_ratio: As a multiple of softmax attention's at the same tokens: median of the
            rounds' ratios; None where the machine was too busy.
        latency_p: P-value of the test that the two differ.
        latency_verdict: What `keymix.analysis.timing.compare` says of the two, at one level for all
            mixers at these tokens, each number of tokens having its own; None for softmax attention
            itself.
        images_per_s: Images a second in batches.
        peak_inference_mib: Memory a forward pass of a batch adds, MiB.
        peak_training_mib: The same of forward and backward.
        peak_ratio: Peak of training as a multiple of softmax attention's.
        peak_note: How the peak was measured, or why it is None.
        reason: Why nothing was measured; None if it was.
    """

    mixer: str
    tokens: int
    grid: tuple[int, int]
    params: int | None = None
    macs: int | None = None
    activation_bytes: int | None = None
    latency_ms: float | None = None
    latency_q1_ms: float | None = None
    latency_q3_ms: float | None = None
    latency_ratio: float | None = None
    latency_p: float | None = None
    latency_verdict: Verdict | None = None
    images_per_s: float | None = None
    peak_inference_mib: float | None = None
    peak_training_mib: float | None = None
    peak_ratio: float | None = None
    peak_note: str | None = None
    reason: str | None = None


@dataclass(kw_only=True, repr=False)
class MixerCosts:
    """What a study found, so far or in all.

    Attributes:
        setting: Sizes and conditions.
        mixers: Which mixers, and the reason of those that could not be counted.
        by_tokens: SKA Fig. 4, left: multiply-adds per parameter against N.
        by_dim: SKA Fig. 4, right: the same against D.
        weights: SKA Table 7 for every mixer.
        scaling: Latency and peak memory against N.
        complete: Whether all tokens asked for have been measured.
    """

    setting: Setting
    mixers: tuple[MixerRow, ...]
    by_tokens: tuple[RatioPoint, ...]
    by_dim: tuple[RatioPoint, ...]
    weights: tuple[WeightRow, ...]
    scaling: tuple[ScalingRow, ...] = ()
    complete: bool = False
