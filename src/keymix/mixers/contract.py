# SPDX-License-Identifier: Apache-2.0
"""The rules of the seam as checks, for the contract tests and for mixers from outside keymix.

Most take a mixer and an :class:`Accuracy` and return why a rule is broken, None where it holds.
They draw from generators of their own, on the CPU, and take mixers wherever these lie.
"""

from __future__ import annotations

import copy
import inspect
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from keymix.errors import Attempt
from keymix.mixers.base import Site, TokenMixer
from keymix.mixers.head_mixer import HeadMixer

CPU = torch.device("cpu")
STEPS = 3  # of a spiking mixer's tokens

# what moves the norms in front of spiking neurons to where enough of them fire
FIRING = {"q_bn.bias": 1.0, "k_bn.bias": 1.8, "v_bn.bias": 1.8, "proj_bn.bias": 1.6}


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """How results are compared, relative to the largest wanted number (at least 1).

    A difference up to `near` is rounding, one above `far` is a change.
    """

    dtype: torch.dtype
    near: float
    far: float
    device: torch.device = CPU

    def tokens(self, mixer: TokenMixer, *lead: int, seed: int = 1) -> Tensor:
        """Return :func:`example_tokens` of this type on this device."""
        return example_tokens(mixer, *lead, seed=seed, dtype=self.dtype).to(self.device)

    def same(self, one: Tensor, other: Tensor) -> bool:
        """Whether two results differ by rounding alone."""
        return one.shape == other.shape and gap(one, other) <= self.near

    def changed(self, one: Tensor, other: Tensor) -> bool:
        """Whether two results differ by more than rounding; another shape is a difference."""
        return one.shape != other.shape or not gap(one, other) <= self.far


def gap(result: Tensor, wanted: Tensor) -> float:
    """Return the largest difference of two tensors of one shape over the largest wanted number."""
    if not wanted.numel():
        return 0.0
    result, wanted = result.detach().double(), wanted.detach().double()
    return float((result - wanted).abs().max()) / max(1.0, float(wanted.abs().max()))


# ---- what mixers are shown ----------------------------------------------------------------------


def spiking(mixer: TokenMixer) -> bool:
    """Whether a mixer takes spikes, time steps first."""
    return mixer.claims.domain == "spiking"


def image_axis(mixer: TokenMixer) -> int:
    """Return the axis of the images in a mixer's tokens: behind the time steps, if any."""
    return 1 if spiking(mixer) else 0


def example_tokens(
    mixer: TokenMixer, *lead: int, seed: int = 1, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return random tokens that fit a mixer's site; spikes for spiking mixers.

    `lead` are the leading axes after the time steps, two images if none are named.
    """
    noise = torch.Generator().manual_seed(seed)
    steps = (STEPS,) if spiking(mixer) else ()
    shape = (*steps, *(lead or (2,)), mixer.site.num_tokens, mixer.site.dim)
    x = torch.randn(shape, generator=noise, dtype=torch.float64)
    return (x > 0).to(dtype) if steps else x.to(dtype)


def stir(module: nn.Module, amount: float = 0.3) -> None:
    """Move every parameter away from its neutral start, the same way for the same name.

    `amount` is the standard deviation of what is added. The norms in front of spiking neurons are
    moved to where about every third fires.
    """
    with torch.no_grad():
        for name, p in module.named_parameters():
            noise = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            p.add_(amount * torch.randn(p.shape, generator=noise, dtype=torch.float64).to(p))
        for name, b in module.named_buffers():
            if name.endswith("running_mean"):
                b.add_(0.1)
            elif name.endswith("running_var"):
                b.mul_(0.5)
        for name, p in module.named_parameters():
            p.add_(FIRING.get(name, 0.0))


def gradients(mixer: nn.Module, x: Tensor, **call: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return output and the gradients of a fixed random sum of it, of tokens and parameters.

    Where no gradient arrives, it is NaN. The backward pass is outside of any autocast, as in
    training.
    """
    x = x.detach().clone().requires_grad_()
    named = {"x": x, **dict(mixer.named_parameters())}
    with torch.enable_grad():
        y = mixer(x, **call)
    noise = torch.Generator().manual_seed(7)
    weight = torch.randn(y.shape, generator=noise, dtype=torch.float64).to(y)
    with torch.enable_grad(), torch.autocast(x.device.type, enabled=False):
        grads = torch.autograd.grad((y * weight).sum(), list(named.values()), allow_unused=True)
    return y.detach(), {
        name: torch.full_like(named[name], torch.nan) if g is None else g
        for name, g in zip(named, grads, strict=True)
    }


# ---- rules --------------------------------------------------------------------------------------


def breaks_constructor(mixer: TokenMixer, site: Site) -> str | None:
    """Say whether the mixer keeps the site that it was built with."""
    if getattr(mixer, "site", None) is not site:
        return "its site is not the one it was given: call super().__init__(site)"
    return None


def breaks_signature(kind: type[TokenMixer]) -> str | None:
    """Say whether ``forward`` takes what hosts hand it."""
    parameters = inspect.signature(kind.forward).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return None
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    lacking = [
        name
        for name in ("grid", "bias")
        if name not in parameters or parameters[name].kind not in by_name
    ]
    if lacking:
        return (
            f"forward takes no {' and no '.join(lacking)}: write forward(x, grid=None, bias=None)"
        )
    return None


def breaks_shape(mixer: TokenMixer, how: Accuracy) -> str | None:
    """Say whether the output is another tensor than the tokens in shape, type or device."""
    for lead in ((2,), (3,)):
        x = how.tokens(mixer, *lead)
        y = mixer(x, grid=mixer.site.grid)
        if not isinstance(y, Tensor):
            return f"forward returns {type(y).__name__}, not a tensor"
        if y.shape != x.shape:
            return f"tokens {list(x.shape)} come back as {list(y.shape)}"
        if y.dtype not in (x.dtype, _autocast_dtype(x)):
            return f"tokens of {x.dtype} come back as {y.dtype}"
        if y.device != x.device:
            return f"tokens on {x.device} come back on {y.device}"
        if not torch.isfinite(y).all():
            return "the output holds NaN or infinity"
    return None


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return what autocast computes in around this call, None without it."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def breaks_input(mixer: TokenMixer, how: Accuracy) -> str | None:
    """Say whether the tokens are written to."""
    x = how.tokens(mixer)
    kept = x.clone()
    mixer(x)
    return None if torch.equal(x, kept) else "forward changes its tokens in place: work on a copy"


def breaks_repetition(mixer: TokenMixer, how: Accuracy) -> str | None:
    """Say whether two equal calls differ, for a mixer in evaluation."""
    x = how.tokens(mixer)
    if how.same(mixer(x), mixer(x)):
        return None
    return "two equal calls differ in evaluation: dropout must follow self.training"


def breaks_leading_axes(mixer: TokenMixer, how: Accuracy) -> str | None:
    """Say whether two leading axes are other than the same tokens folded into one."""
    x, axis = how.tokens(mixer, 2, 3), image_axis(mixer)
    y = mixer(x)
    if y.shape != x.shape:
        return f"tokens {list(x.shape)} come back as {list(y.shape)}"
    if not how.same(y, mixer(x.flatten(axis, axis + 1)).unflatten(axis, (2, 3))):
        return "tokens [2, 3, N, C] are not mixed as [6, N, C] are"
    return None


def breaks_images(mixer: TokenMixer, how: Accuracy) -> str | None:
    """Say whether images of a batch see one another, for a mixer in evaluation."""
    x, axis = how.tokens(mixer, 3), image_axis(mixer)
    y = mixer(x)
    for i in range(3):
        if not how.same(mixer(x.narrow(axis, i, 1)), y.narrow(axis, i, 1)):
            return "an image alone has another answer than in a batch of three"
    return None


def breaks_prefix(mixer: TokenMixer, how: Accuracy) -> str | None:
    """Say whether ``mixes_prefix`` is false; the mixer's site has prefix tokens."""
    p = mixer.site.num_prefix_tokens
    x = how.tokens(mixer, 16)  # enough that some spikes hang on one token
    moved = x.clone()
    moved[..., p:, :] = how.tokens(mixer, 16, seed=9)[..., p:, :]
    seen = how.changed(mixer(x)[..., :p, :], mixer(moved)[..., :p, :])
    if seen == mixer.claims.mixes_prefix:
        return None
    if seen:
        return "prefix tokens change with the patches, but traits say mixes_prefix=False"
    return "prefix tokens receive nothing from patches: say Traits(mixes_prefix=False)"


def permutes(mixer: TokenMixer, how: Accuracy) -> bool:
    """Whether permuted tokens give the permuted output."""
    x = how.tokens(mixer)
    order = torch.randperm(x.shape[-2], generator=torch.Generator().manual_seed(5))
    moved = copy.deepcopy(mixer)(x[..., order, :])
    return how.same(moved, mixer(x)[..., order, :])


def breaks_permutation(mixer: TokenMixer, how: Accuracy) -> str | None:
    """Say whether the mixer claims to be equivariant and is not."""
    if mixer.claims.permutation == "positional" or permutes(mixer, how):
        return None
    return "the places of tokens matter: say Traits(permutation='positional')"


def example_mask(mixer: TokenMixer, how: Accuracy) -> tuple[Tensor, list[int]]:
    """Return a bias that hides token 1 from all other queries, and these queries."""
    n = mixer.site.num_tokens
    others = [i for i in range(n) if i != 1]
    bias = torch.zeros(n, n, dtype=how.dtype, device=how.device)
    bias[others, 1] = -torch.inf
    return bias, others


def mask_holds(mixer: TokenMixer, how: Accuracy) -> bool:
    """Whether a bias of minus infinity at token 1 keeps its value from all other queries."""
    bias, others = example_mask(mixer, how)
    x = how.tokens(mixer)
    if isinstance(mixer, HeadMixer):  # its logits may see token 1, so that the value alone moves
        inputs = mixer.inputs(x, mixer.site.grid)
        moved = {**inputs, "v": inputs["v"].clone()}
        moved["v"][..., 1, :] += 3.0
        one, other = (_from(mixer, given, x, bias) for given in (inputs, moved))
    else:
        shifted = x.clone()
        shifted[..., 1, :] += 3.0
        one, other = mixer(x, bias=bias), mixer(shifted, bias=bias)
    one, other = one[..., others, :], other[..., others, :]
    return bool(torch.isfinite(one).all()) and torch.equal(one, other)


def _from(mixer: HeadMixer, inputs: dict[str, Tensor], x: Tensor, bias: Tensor | None) -> Tensor:
    """Run a mixer on roles that are made already."""
    copied = copy.copy(mixer)
    copied.__dict__["inputs"] = lambda x, grid: inputs
    out: Tensor = copied(x, bias=bias)
    return out


def breaks_mask(mixer: TokenMixer, how: Accuracy) -> str | None:
    """Say whether the mixer claims to honour a mask and does not."""
    if not mixer.claims.maskable or mask_holds(mixer, how):
        return None
    return "a masked token reaches other queries: add bias to the logits, or say maskable=False"


def breaks_roles(mixer: TokenMixer, how: Accuracy) -> str | None:
    """Say which declared role changes nothing."""
    if not isinstance(mixer, HeadMixer):
        return None
    x = how.tokens(mixer)
    inputs, y = mixer.inputs(x, mixer.site.grid), mixer(x)
    for role in mixer.roles:
        noise = torch.randn(inputs[role].shape, generator=torch.Generator().manual_seed(3))
        moved = {**inputs, role: inputs[role] + noise.to(inputs[role])}
        if not how.changed(_from(mixer, moved, x, None), y):
            return f"role {role!r} is projected and changes nothing: roles={mixer.roles}"
    return None


def breaks_gradients(mixer: TokenMixer, how: Accuracy) -> str | None:
    """Say which parameter gets no gradient, or one that was declared zero and is not."""
    zero = mixer.zero_gradients
    unknown = zero - dict(mixer.named_parameters()).keys()
    if unknown:
        return f"zero_gradients names {sorted(unknown)}, no parameters"
    x = how.tokens(mixer, 4)
    _, grads = gradients(mixer, x)
    none = torch.finfo(how.dtype).eps * 1e4 if _autocast_dtype(x) is None else how.near
    if grads["x"].isnan().any():
        return "no gradient reaches the tokens"
    size = max(1.0, *(float(g.abs().max()) for g in grads.values() if not g.isnan().any()))
    for key, grad in grads.items():
        if grad.isnan().any():
            return f"no gradient reaches {key}"
        largest = float(grad.abs().max())
        if largest == torch.inf or (key in zero and largest > size * none):
            found = "is infinite" if largest == torch.inf else "was declared zero and is not"
            return f"the gradient of {key} {found}"
        if key not in zero and not largest > how.far:
            return f"the gradient of {key} is zero"
    return None


def breaks_state(mixer: TokenMixer, fresh: TokenMixer, how: Accuracy) -> str | None:
    """Say whether a state moved to a mixer built alike, with other weights, leaves something."""
    fresh.load_state_dict({k: v.detach().clone() for k, v in mixer.state_dict().items()})
    x = how.tokens(mixer)
    if not torch.equal(fresh(x), mixer(x)):
        return "another such mixer with its state_dict gives other answers: register all there is"
    if not torch.equal(copy.deepcopy(mixer)(x), mixer(x)):
        return "a deep copy gives other answers"
    return None


def option_acts(
    make: Callable[..., TokenMixer], plain: dict[str, Any], other: dict[str, Any], how: Accuracy
) -> bool:
    """Whether two choices of options differ where a mixer starts, in a result or in a gradient.

    ``make`` builds a mixer of options; ``stirred=False`` leaves it at its start.
    """
    before, after = (dict(make(o, stirred=False).state_dict()) for o in (plain, other))
    same_names = before.keys() == after.keys()
    for key in before if same_names else ():
        if before[key].shape == after[key].shape and how.changed(before[key], after[key]):
            return True  # the same draws, other weights: it acts where a model starts
    one, two = make(plain), make(other)
    shared = one.state_dict()
    fits = {k: v for k, v in two.state_dict().items() if k in shared and shared[k].shape == v.shape}
    two.load_state_dict({k: shared[k] for k in fits}, strict=False)
    x = how.tokens(one, 3)
    for training in (True, False):
        results = []
        for mixer in (one, two):
            mixer.train(training)
            torch.default_generator.manual_seed(11)  # other devices' states are the caller's
            y, grads = gradients(mixer, x)
            kept = {k: grads[k].nan_to_num() for k in ("x", *fits) if k in grads}
            results.append({"output": y, **kept})
        if any(how.changed(results[0][k], results[1][k]) for k in results[0]):
            return True
    here, there = (_elsewhere(mixer, how) for mixer in (one, two))
    if here is None or there is None:
        return here is not there
    return how.changed(here, there)


def _elsewhere(mixer: TokenMixer, how: Accuracy) -> Tensor | None:
    """Return the output on another grid, None if it is refused."""
    noise = torch.Generator().manual_seed(1)
    count = mixer.site.num_prefix_tokens + 10
    x = torch.randn(3, count, mixer.site.dim, generator=noise, dtype=torch.float64)
    with Attempt():
        y: Tensor = mixer(x.to(how.device, how.dtype), grid=(2, 5))
        return y
    return None
