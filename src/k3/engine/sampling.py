"""From logits to a token, by the rule that makes a sampled run reproducible.

The random number of a draw depends on the seed and on the token's place in the sequence alone, so a draw doesn't
depend on what happened before it, on who shared the step, or on how far ahead the engine works.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from k3.errors import NonFiniteError, UsageError
from k3.kernels import F32Array, Kernels

_SEED_BITS = 64


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a token is chosen. Temperature 0 is the arg-max; `top_k` 0 and `top_p` 1 keep everything.

    Raises:
        UsageError: a value is out of its range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None

    def __post_init__(self) -> None:
        _require(0.0 <= self.temperature < float("inf"), "temperature", self.temperature, "a number from 0 up")
        _require(0.0 < self.top_p <= 1.0, "top_p", self.top_p, "a number above 0 and up to 1")
        _require(self.top_k >= 0, "top_k", self.top_k, "a whole number from 0 (keep all) up")
        if self.seed is not None:
            _require(
                0 <= self.seed < 1 << _SEED_BITS, "seed", self.seed, f"a whole number from 0 to 2^{_SEED_BITS} - 1"
            )


def _require(holds: bool, name: str, value: object, expected: str) -> None:
    if not holds:
        raise UsageError(f"{name}: expected {expected}, found {value}.")


class Sampler:
    """Draws the tokens of one sequence.

    Without a seed one is drawn when the temperature needs it; `seed` is then the one in use, and None for arg-max.
    """

    def __init__(self, ops: Kernels, params: SamplingParams) -> None:
        self._ops = ops
        self._params = params
        self.seed: int | None = None
        if params.temperature > 0:
            self.seed = secrets.randbits(_SEED_BITS) if params.seed is None else params.seed

    def choose(self, logits: F32Array, position: int) -> int:
        """The token at `position` of the sequence (0-based, the prompt counts); logits float32 [vocab_size].

        Raises:
            NonFiniteError: a logit is NaN.
        """
        best = int(self._ops.argmax(logits[None])[0])
        if best < 0:
            raise NonFiniteError(f"the logits of position {position} hold a NaN, so no token can be chosen.")
        if self.seed is None:
            return best
        order, cumulative = self._candidates(logits)
        threshold = _uniform(self.seed, position) * cumulative[-1]
        return int(order[np.searchsorted(cumulative, threshold, side="right")])

    def _candidates(self, logits: F32Array) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Ids by falling probability and their cumulative weights, after temperature, top-k and top-p."""
        params = self._params
        scaled = logits / np.float32(params.temperature)
        order = np.argsort(-scaled, kind="stable")
        if params.top_k:
            order = order[: params.top_k]
        ranked = scaled[order]
        weights = self._ops.exp((ranked - ranked[0])[None])[0].astype(np.float64)
        cumulative = np.add.accumulate(weights)
        # The first place where the sum reaches top_p of the whole is the last one kept.
        kept = int(np.searchsorted(cumulative, params.top_p * cumulative[-1], side="left")) + 1
        return order[:kept], cumulative[:kept]


def _uniform(seed: int, position: int, choice: int = 0) -> float:
    """A number in [0, 1) from Philox4x64-10; `choice` tells apart several answers to one prompt."""
    raw = np.random.Philox(key=seed, counter=[position, choice, 0, 0]).random_raw()
    return float(int(raw) >> 11) * 2.0**-53


def log_probabilities(ops: Kernels, logits: F32Array, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Log-probability of `ids[row]` by raw logits float32 [rows, vocab_size]: float64 [rows].

    Evaluated as (z − max) − log(Σ exp(z − max)): exponentials and logarithm in float32, the sum one after another
    in float64.
    """
    return np.array([_log_probability(ops, row, int(token)) for row, token in zip(logits, ids, strict=True)])


def _log_probability(ops: Kernels, logits: F32Array, token: int) -> float:
    shifted = logits - logits.max()
    total = np.add.accumulate(ops.exp(shifted[None])[0].astype(np.float64))[-1]
    log = ops.log(np.array([[total]], np.float32))[0, 0]
    return float(shifted[token] - log)
