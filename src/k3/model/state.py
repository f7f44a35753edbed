"""What a sequence carries from step to step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from k3.checkpoint.config import ModelConfig
from k3.kernels import F32Array


@dataclass(slots=True)
class KdaState:
    """The constant-size memory of a KDA layer.

    `recurrent` is float32 [heads, K, V] (k-major); a tail is float32 [short_conv_kernel_size - 1, projection], the
    last inputs of a convolution, oldest first. All begin at zero.
    """

    recurrent: F32Array
    q_tail: F32Array
    k_tail: F32Array
    v_tail: F32Array

    @classmethod
    def empty(cls, config: ModelConfig) -> KdaState:
        kda = config.linear_attn_config
        tail = (kda.short_conv_kernel_size - 1, kda.num_heads * kda.head_dim)
        return cls(
            np.zeros((kda.num_heads, kda.head_dim, kda.head_dim), np.float32),
            np.zeros(tail, np.float32),
            np.zeros(tail, np.float32),
            np.zeros(tail, np.float32),
        )

    @property
    def arrays(self) -> tuple[F32Array, ...]:
        """All that the state is, in the order of the fields."""
        return self.recurrent, self.q_tail, self.k_tail, self.v_tail

    def copy(self) -> KdaState:
        """The same state in memory of its own."""
        return KdaState(*(array.copy() for array in self.arrays))

    def assign(self, other: KdaState) -> None:
        """Take over the values of `other`."""
        for mine, theirs in zip(self.arrays, other.arrays, strict=True):
            mine[...] = theirs

    @staticmethod
    def nbytes(config: ModelConfig) -> int:
        """Bytes of one layer's state."""
        kda = config.linear_attn_config
        projection = kda.num_heads * kda.head_dim
        return 4 * projection * (kda.head_dim + 3 * (kda.short_conv_kernel_size - 1))


class MlaCache:
    """The latent cache of an MLA layer: a row per position, nothing expanded.

    A row is float32 [kv_lora_rank + qk_rope_head_dim]: the normed latent, then the rope part as it is.
    """

    def __init__(self, config: ModelConfig, capacity: int) -> None:
        self._kv_lora_rank = config.kv_lora_rank
        # Rows are touched only when they are written: an unused capacity costs no memory.
        self._rows = np.empty((capacity, config.kv_lora_rank + config.qk_rope_head_dim), np.float32)
        self._length = 0

    @staticmethod
    def nbytes_per_position(config: ModelConfig) -> int:
        """Bytes that one position takes in one layer."""
        return 4 * (config.kv_lora_rank + config.qk_rope_head_dim)

    def __len__(self) -> int:
        return self._length

    @property
    def rows(self) -> F32Array:
        """All rows so far (a view)."""
        return self._rows[: self._length]

    def resize(self, length: int) -> None:
        """Count `length` rows as there: fewer than before drops the last ones, the values of more are to be set."""
        self._length = length

    def append(self, latent: F32Array, rope: F32Array) -> F32Array:
        """Store new positions; returns all rows so far, the new ones last (a view)."""
        stop = self._length + latent.shape[0]
        self._rows[self._length : stop, : self._kv_lora_rank] = latent
        self._rows[self._length : stop, self._kv_lora_rank :] = rope
        self._length = stop
        return self._rows[:stop]


LayerState: TypeAlias = KdaState | MlaCache


def empty_states(config: ModelConfig, layers: int, capacity: int) -> list[LayerState]:
    """The states of a sequence that has seen nothing, for the first `layers` layers and `capacity` positions."""
    return [KdaState.empty(config) if config.is_kda(index) else MlaCache(config, capacity) for index in range(layers)]
