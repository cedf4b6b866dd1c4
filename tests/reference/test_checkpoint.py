"""Checkpoints: both name styles, sharded or not, read lazily; everything that is wrong is said at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from reference.checkpoint import canonical_name
from reference.config import V41Config
from reference.errors import WeightsError
from reference.weights import CheckpointWeights, RandomWeights, tensor_specs

TOY = V41Config.toy()
SOURCE = RandomWeights(TOY, 11)
TENSORS = {name: SOURCE[name] for name in tensor_specs(TOY)}


def hugging_face_name(name: str) -> str:
    """The other style of the same name."""
    parts = {"attn": "self_attn", "ffn": "mlp", "scale": "weight_scale_inv"}
    if name in ("embed.weight", "head.weight"):
        return {"embed.weight": "model.embed_tokens.weight", "head.weight": "lm_head.weight"}[name]
    name = name.replace("gate.bias_vl", "gate.BIAS_VL").replace("gate.bias", "gate.e_score_correction_bias")
    renamed = [parts.get(part, part) for part in name.replace("BIAS_VL", "bias_vl").split(".")]
    return "model." + ".".join(renamed)


def as_released(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The formats on disk: bf16 where the product is fp32, wo_a in fp8 with a scale, fp4 as I8."""
    out = {}
    for name, tensor in tensors.items():
        if name.endswith("wo_a.weight"):
            out[name] = (tensor.float() * 64).to(torch.float8_e4m3fn)
            rows, columns = tensor.shape
            out[name.replace("weight", "scale")] = torch.full(
                (-(-rows // 32), columns // 32), 121, dtype=torch.uint8
            ).view(torch.float8_e8m0fnu)
        elif name.endswith(("head.weight", "compressor.wgate.weight")) and tensor.dtype == torch.float32:
            out[name] = tensor.bfloat16()
        else:
            out[name] = tensor.view(torch.int8) if tensor.dtype == torch.uint8 else tensor
    return out


def shards(tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """By file: one a layer, one for the rest."""
    files: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        canonical = canonical_name(name)
        part = canonical.split(".")[:2] if canonical.startswith(("layers.", "mtp.")) else ["rest"]
        files.setdefault(f"model-{'-'.join(part)}.safetensors", {})[name] = tensor
    return files


def write_sharded(folder: Path, tensors: dict[str, Tensor]) -> Path:
    weight_map = {}
    for file, content in shards(tensors).items():
        save_file(content, folder / file)
        weight_map |= dict.fromkeys(content, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def faults(path: Path, config: V41Config = TOY) -> dict[str, str]:
    with pytest.raises(WeightsError) as caught:
        CheckpointWeights(path, config)
    return {problem.field: str(problem) for problem in caught.value.problems}


@pytest.mark.parametrize("style", ["release", "hugging face"])
@pytest.mark.parametrize("layout", ["one file", "sharded", "no index"])
def test_both_styles_and_every_layout_give_the_same_tensors(tmp_path, style, layout):
    rename = hugging_face_name if style == "hugging face" else str
    tensors = {rename(name): tensor for name, tensor in TENSORS.items()}
    path = tmp_path
    if layout == "one file":
        path = tmp_path / "toy.safetensors"
        save_file(tensors, path)
    else:
        write_sharded(tmp_path, tensors)
        if layout == "no index":
            (tmp_path / "model.safetensors.index.json").unlink()
    weights = CheckpointWeights(path, TOY)
    assert all(same(weights[name], TENSORS[name]) for name in TENSORS)
    assert weights.linear("layers.2.ffn.experts.3.w1").kind == "fp4"


def test_formats_on_disk_are_converted_without_a_change_of_value(tmp_path):
    released = as_released(TENSORS)
    save_file(released, tmp_path / "toy.safetensors")
    weights = CheckpointWeights(tmp_path / "toy.safetensors", TOY)
    for name, spec in tensor_specs(TOY).items():
        tensor = weights[name]
        assert tensor.dtype == spec.dtype and tensor.shape == spec.shape
        if name.endswith("wo_a.weight"):
            # fp8 codes times 2^-6
            assert torch.equal(tensor, (released[name].float() * 2.0**-6).bfloat16())
        elif released[name].dtype == torch.bfloat16 and spec.dtype == torch.float32:
            assert torch.equal(tensor, released[name].float())
        else:
            assert same(tensor, TENSORS[name])


def test_wo_a_blocks_follow_from_the_shapes(tmp_path):
    codes = torch.ones(64, 128).to(torch.float8_e4m3fn)
    exponents = torch.tensor([[127, 128]], dtype=torch.uint8)  # one block of 64 x 64 a column
    name = "layers.0.attn.wo_a"
    tensors = TENSORS | {f"{name}.weight": codes, f"{name}.scale": exponents.view(torch.float8_e8m0fnu)}
    save_file(tensors, tmp_path / "toy.safetensors")
    wo_a = CheckpointWeights(tmp_path, TOY)[f"{name}.weight"]
    assert (wo_a[:, :64] == 1).all() and (wo_a[:, 64:] == 2).all()
    tensors[f"{name}.scale"] = torch.ones(3, 2, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    save_file(tensors, tmp_path / "toy.safetensors")
    assert "square blocks that tile [64, 128]" in faults(tmp_path)[f"{name}.scale"]
    del tensors[f"{name}.scale"]
    save_file(tensors, tmp_path / "toy.safetensors")
    assert "nothing" in faults(tmp_path)[f"{name}.scale"]


def test_a_slice_opens_and_reads_its_own_files_only(tmp_path):
    write_sharded(tmp_path, TENSORS)
    keep = {"model-layers-5.safetensors", "model-layers-6.safetensors", "model-rest.safetensors"}
    for file in tmp_path.glob("*.safetensors"):
        if file.name not in keep:
            file.write_bytes(b"unreadable")  # a touch of any other file would show
    weights = CheckpointWeights(tmp_path, TOY.sliced((5, 6)))
    assert {file.name for file in weights.files_opened} == keep
    assert weights.bytes_read == 0
    name = "layers.5.attn.wkv.weight"
    assert same(weights[name], TENSORS[name])
    assert weights.bytes_read == TENSORS[name].nbytes
    weights[name]
    assert weights.bytes_read == TENSORS[name].nbytes, "kept, not read again"
    assert len(faults(tmp_path)) > 8, "the whole model does need the others"


def test_everything_wrong_is_listed_at_once(tmp_path):
    tensors = dict(TENSORS)
    del tensors["layers.4.attn.attn_sink"], tensors["layers.8.ffn.gate.bias_vl"]
    tensors["layers.3.attn.extra.weight"] = torch.ones(1)
    tensors["vision_tower.blocks.0.weight"], tensors["image_start"] = torch.ones(1), torch.ones(1)
    tensors["layers.1.attn.wkv.weight"] = TENSORS["layers.1.attn.wkv.weight"][:-1].clone()
    tensors["layers.2.attn.wq_a.weight"] = torch.zeros(64, 128, dtype=torch.float16)
    tensors["layers.2.attn.indexer.weights_proj.weight"] = torch.zeros(4, 128)
    tensors["model.layers.0.self_attn.attn_sink"] = TENSORS["layers.0.attn.attn_sink"].clone()
    write_sharded(tmp_path, tensors)
    found = faults(tmp_path)
    assert set(found) == {
        "layers.4.attn.attn_sink",
        "layers.3.attn.extra.weight",
        "layers.1.attn.wkv.weight",
        "layers.2.attn.wq_a.weight",
        "layers.2.attn.indexer.weights_proj.weight",
        "layers.0.attn.attn_sink",
    }
    assert "extra" in found["layers.3.attn.extra.weight"]
    assert (
        "[64, 128]" in found["layers.1.attn.wkv.weight"] and "[63, 128]" in found["layers.1.attn.wkv.weight"]
    )
    assert "float16" in found["layers.2.attn.wq_a.weight"]
    assert "one tensor of this name" in found["layers.0.attn.attn_sink"]


def test_truncated_and_foreign_files(tmp_path):
    file = tmp_path / "toy.safetensors"
    save_file(TENSORS, file)
    whole = file.read_bytes()
    for content, words in (
        (whole[:-1], "truncated"),
        (whole[: len(whole) // 2], "truncated"),
        (whole[:1000], "truncated"),
        (whole[:3], "readable"),
        (b"", "readable"),
        (whole + b"more", "longer"),
        (b"\x08\x00\x00\x00\x00\x00\x00\x00not json", "readable"),
    ):
        file.write_bytes(content)
        assert words in faults(tmp_path)[str(file)], words


def test_missing_shard_and_broken_index(tmp_path):
    write_sharded(tmp_path, TENSORS)
    (tmp_path / "model-layers-3.safetensors").unlink()
    found = faults(tmp_path)
    assert "No such file" in found[str(tmp_path / "model-layers-3.safetensors")]
    assert "layers.3.attn.wkv.weight" in found
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"metadata": {}}')
    assert "weight_map" in faults(tmp_path)[str(index)]
    for path in (tmp_path / "nowhere", tmp_path / "empty"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        assert "checkpoint" in faults(path)["path"]


def test_an_index_that_promises_what_a_file_lacks(tmp_path):
    write_sharded(tmp_path, TENSORS)
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["layers.3.attn.ghost"] = "model-layers-3.safetensors"
    index.write_text(json.dumps(content))
    assert "as the index says" in faults(tmp_path)["layers.3.attn.ghost"]


def test_norms_in_float32_must_be_exact_in_bfloat16(tmp_path):
    name = "layers.0.attn_norm.weight"
    save_file(TENSORS | {name: TENSORS[name].float()}, tmp_path / "toy.safetensors")
    assert same(CheckpointWeights(tmp_path, TOY)[name], TENSORS[name])
    save_file(TENSORS | {name: TENSORS[name].float() + 1e-5}, tmp_path / "toy.safetensors")
    with pytest.raises(WeightsError, match=r"layers\.0\.attn_norm"):
        CheckpointWeights(tmp_path, TOY)[name]


def test_token_map_is_given_or_comes_from_the_tokenizer(tmp_path):
    save_file(TENSORS, tmp_path / "toy.safetensors")
    with pytest.raises(WeightsError, match="build_token_map"):
        _ = CheckpointWeights(tmp_path, TOY).token_map
    given = SOURCE.token_map
    assert torch.equal(CheckpointWeights(tmp_path, TOY, token_map=given).token_map, given)
    with pytest.raises(WeightsError, match="token_map"):
        CheckpointWeights(tmp_path, TOY, token_map=given[:-1])


@pytest.mark.slow
def test_one_layer_of_a_checkpoint_of_released_size(tmp_path):
    """512 GB in 41 sparse files: a layer's tensors are found and read without the rest."""
    flash = V41Config.flash()
    formats = {torch.float32: "F32", torch.bfloat16: "BF16", torch.uint8: "U8"}
    formats |= {torch.float8_e4m3fn: "F8_E4M3", torch.float8_e8m0fnu: "F8_E8M0"}
    weight_map, files = {}, {}
    for name, spec in tensor_specs(flash).items():
        part = name.split(".")[1] if name.startswith("layers.") else "rest"
        weight_map[name] = f"model-{part}.safetensors"
        files.setdefault(weight_map[name], []).append(spec)
    for file, specs in files.items():
        header, offset = {}, 0
        for spec in specs:
            end = offset + spec.nbytes
            entry = {"dtype": formats[spec.dtype], "shape": spec.shape, "data_offsets": [offset, end]}
            header[spec.name], offset = entry, end
        text = json.dumps(header).encode()
        with open(tmp_path / file, "wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            stream.truncate(8 + len(text) + offset)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    weights = CheckpointWeights(tmp_path, flash.sliced((20,)))
    assert {file.name for file in weights.files_opened} == {"model-20.safetensors", "model-rest.safetensors"}
    assert weights["layers.20.ffn.experts.383.w2.weight"].shape == (5120, 1152)
    assert weights.bytes_read == 5120 * 1152
    assert len(CheckpointWeights(tmp_path, flash).files_opened) == 41


def test_only_the_rows_that_are_looked_up_are_read_of_a_large_table(tmp_path):
    save_file(TENSORS, tmp_path / "toy.safetensors")
    name = "layers.1.engram.embed.weight"
    ids = torch.tensor([5, 0, 183, 5])
    weights = CheckpointWeights(tmp_path, TOY, cache_bytes=TENSORS[name].nbytes - 1)
    rows = weights.rows(name, ids)
    assert rows.dtype == torch.float8_e4m3fn
    assert torch.equal(rows.view(torch.uint8), TENSORS[name].view(torch.uint8)[ids])
    assert weights.bytes_read == len(ids) * TENSORS[name].shape[1]
    small = CheckpointWeights(tmp_path, TOY)
    assert torch.equal(small.rows(name, ids).view(torch.uint8), rows.view(torch.uint8))
    assert small.bytes_read == TENSORS[name].nbytes
