"""The dtype of each tensor on the wire, and that readers follow what was published."""

import json
import re
import string

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from trinity_sync.backends.saved_tensors import on_the_wire
from trinity_sync.errors import ConfigError
from trinity_sync.weights.apply import MismatchError, Receiver
from trinity_sync.weights.digests import version_digest
from trinity_sync.weights.layout import PartLayout
from trinity_sync.weights.shards import is_floating, whole
from trinity_sync.weights.staging import stage
from trinity_sync.weights.tensors import cast_model, from_torch, hold_fp32, saved_tensors, state_digest
from trinity_sync.weights.wire import WireFormat, found_in, kept_names

NAMES = st.sampled_from(["lm_head.weight", "model.norm.weight", "layers.0.gate.bias", "layers.11.gate.bias"])
DTYPES = st.sampled_from(["BF16", "F16", "F32", "I64", "BOOL"])


@given(st.sampled_from(["BF16", "F16", "F32", None]), st.frozensets(NAMES), NAMES, DTYPES)
def test_floating_tensors_travel_in_wire_dtype_and_kept_ones_in_fp32(
    dtype: str | None, kept: frozenset[str], name: str, held: str
) -> None:
    wire = WireFormat(dtype, kept)
    expected = held if not is_floating(held) else "F32" if name in kept else dtype or held
    assert wire.of(name, held) == expected
    assert WireFormat.from_json(json.loads(json.dumps(wire.to_json()))) == wire
    if dtype is not None:
        published = {each: wire.of(each, "BF16") for each in kept | {name}}
        seen = WireFormat.seen(dtype, published)
        assert {each: seen.of(each, "BF16") for each in published} == published, "it cannot be told from the tensors"


@given(st.text(string.ascii_lowercase + "._*", min_size=1), st.text(string.ascii_lowercase + "._"))
def test_an_entry_is_found_as_a_part_of_the_name_with_stars_for_anything(entry: str, name: str) -> None:
    assert found_in(entry, name) == bool(re.search(entry.replace(".", r"\.").replace("*", ".*"), name))


def test_a_list_keeps_what_it_means_and_an_entry_that_means_nothing_is_refused() -> None:
    names = ["a.gate.bias", "a.gate.weight", "b.gate.bias", "norm"]
    assert kept_names(["a.*bias", "norm"], names, strict=True) == {"a.gate.bias", "norm"}
    assert kept_names([], names, strict=True) == frozenset()
    assert kept_names(["nothing"], names) == frozenset(), "a model's class may name what this one has not"
    with pytest.raises(ConfigError, match=r"sync\.keep_fp32 names 'nothing', found in the name of no tensor"):
        kept_names(["norm", "nothing"], names, strict=True)


def test_an_explorer_digests_each_tensor_in_the_dtype_in_which_it_was_published() -> None:
    wire = WireFormat("BF16", frozenset({"bias"}))
    tensors = {"bias": torch.randn(5), "weight": torch.randn(4, 3)}
    layout = PartLayout.build("0", [whole(n, wire.of(n, "F32"), t.shape) for n, t in tensors.items()], 1 << 16)
    segment = bytearray(layout.nbytes)
    stage(layout, tensors, memoryview(segment))
    receiver = Receiver({"bias": torch.zeros(5), "weight": torch.zeros(4, 3)})
    receiver.check([layout])
    receiver.begin()
    receiver.apply(layout, segment)
    assert version_digest(receiver.taken()) == state_digest(tensors, wire) == receiver.digest(wire)
    assert state_digest(tensors, wire) != state_digest(tensors, "BF16")
    narrow = Receiver({"bias": torch.zeros(5, dtype=torch.bfloat16), "weight": torch.zeros(4, 3)})
    with pytest.raises(MismatchError, match=r"rounded.*sync\.keep_fp32 \(bias: F32 published, BF16 here\)"):
        narrow.check([layout])


def test_a_cast_model_keeps_what_is_to_be_kept_whole() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    bias, mean = model[0].bias.detach().clone(), torch.randn(3)
    model[1].running_mean.copy_(mean)  # type: ignore[operator, union-attr]
    model[1].register_buffer("computed", torch.randn(3), persistent=False)
    cast_model(model, torch.bfloat16, ["0.bias", "running_mean"])
    assert model[1].computed.dtype == torch.float32, "no state dict has it, so nothing brings it back"
    found = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    kept = {name for name, dtype in found.items() if dtype == torch.float32}
    assert kept == {"0.bias", "1.running_mean"}
    assert torch.equal(model[0].bias, bias)
    assert torch.equal(model.state_dict()["1.running_mean"], mean)
    assert found["1.num_batches_tracked"] == torch.int64


EXPERTS = {
    "vocab_size": 11,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 8,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 4,
}


def test_what_is_kept_goes_by_the_names_that_tensors_are_saved_by() -> None:
    """Experts are held as one tensor, under another name."""
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**EXPERTS)).to(torch.bfloat16)
    kept = hold_fp32(model, ["experts.*down_proj"])
    assert kept == [f"model.layers.0.mlp.experts.{number}.down_proj.weight" for number in range(2)]
    published = {name: saved.dtype for name, saved in on_the_wire(model, "BF16", ["experts.*down_proj"]).items()}
    assert {name: from_torch(tensor.dtype) for name, tensor in saved_tensors(model).items()} == published
    with pytest.raises(ConfigError, match=r"keeps .*0\.up_proj\.weight in fp32 and not .*gate_up_proj, of one"):
        hold_fp32(model, ["up_proj"])
