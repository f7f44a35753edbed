"""The layers and the walk over them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from k3.checkpoint.config import ModelConfig
from k3.kernels import F32Array, Kernels
from k3.model.attention_residual import AttentionResidual, ResidualStream
from k3.model.batch import Batch
from k3.model.kda import Kda
from k3.model.latent_moe import LatentMoe
from k3.model.mla import Mla
from k3.model.mlp import GatedMlp, Situ
from k3.model.norm import RmsNorm
from k3.model.weights import ExpertSource, LayerWeights, WeightSource, linear


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Attention and feed-forward, each reading its own mix of the residual stream."""

    index: int
    starts_block: bool
    attention_residual: AttentionResidual
    input_norm: RmsNorm
    attention: Kda | Mla
    mlp_residual: AttentionResidual
    post_attention_norm: RmsNorm
    feed_forward: GatedMlp | LatentMoe

    @classmethod
    def bind(cls, config: ModelConfig, source: WeightSource, index: int) -> DecoderLayer:
        attention = (Kda if config.is_kda(index) else Mla).bind(config, source, index)
        feed_forward: GatedMlp | LatentMoe
        if config.is_moe(index):
            feed_forward = LatentMoe.bind(config, source, index)
        else:
            feed_forward = GatedMlp("mlp", config.intermediate_size, config.hidden_size, Situ.of(config))
        return cls(
            index,
            config.starts_block(index),
            _residual(config, source, index, "self_attention_res"),
            _norm(config, source, index, "input_layernorm"),
            attention,
            _residual(config, source, index, "mlp_res"),
            _norm(config, source, index, "post_attention_layernorm"),
            feed_forward,
        )

    def __call__(
        self, ops: Kernels, weights: LayerWeights, experts: ExpertSource, stream: ResidualStream, batch: Batch
    ) -> None:
        """Advance the stream and the states in `batch` by one layer."""
        x = self.input_norm(ops, self.attention_residual(ops, stream))
        if self.starts_block:
            stream.snapshot()
        stream.add(ops, self.attention(ops, weights, x, batch))
        x = self.post_attention_norm(ops, self.mlp_residual(ops, stream))
        if isinstance(self.feed_forward, LatentMoe):
            stream.add(ops, self.feed_forward(ops, weights, experts, x, batch))
        else:
            stream.add(ops, self.feed_forward(ops, weights, x))


class Transformer:
    """The first `layers` layers of the text model, between the embedding and the head."""

    def __init__(self, config: ModelConfig, source: WeightSource, layers: int) -> None:
        self.config = config
        self._source = source
        self._layers = [DecoderLayer.bind(config, source, index) for index in range(layers)]
        self._output_residual = _residual(config, source, None, "model.output_attn_res")
        self._norm = _norm(config, source, None, "model.norm")

    def __len__(self) -> int:
        return len(self._layers)

    def hidden(
        self, ops: Kernels, experts: ExpertSource, ids: npt.NDArray[np.int64], batch: Batch, *, head: bool
    ) -> F32Array:
        """Walk all layers once; float32 [surviving rows, hidden_size], before the final norm.

        Parts that fail leave the batch at the end of the layer in which they failed, with their error set. `head`
        tells whether `logits` will be asked for.
        """
        self._source.begin_step(head=head)
        stream = ResidualStream(self._source.embed(ids))
        for layer in self._layers:
            layer(ops, self._source.layer(layer.index), experts, stream, batch)
            kept = batch.drop_failed()
            if kept is not None:
                stream.keep(kept)
            if not len(batch):
                return np.empty((0, self.config.hidden_size), np.float32)
        return self._output_residual(ops, stream)

    def logits(self, ops: Kernels, hidden: F32Array) -> F32Array:
        """float32 [rows, hidden_size] to [rows, vocab_size]."""
        return linear(ops, self._source.head(), "lm_head.weight", self._norm(ops, hidden), self.config.vocab_size)


def _norm(config: ModelConfig, source: WeightSource, layer: int | None, name: str) -> RmsNorm:
    return RmsNorm(source.vector(layer, f"{name}.weight"), config.rms_norm_eps)


def _residual(config: ModelConfig, source: WeightSource, layer: int | None, name: str) -> AttentionResidual:
    return AttentionResidual(
        source.vector(layer, f"{name}_norm.weight"),
        source.vector(layer, f"{name}_proj.weight")[0],
        config.rms_norm_eps,
    )
