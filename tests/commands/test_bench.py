"""`python -m tango_jax.bench --model=...`: counted work by hand, sizes from memory, and mistakes in one line.

Seconds are whatever they are; the rates that shares refer to are given here instead of measured.
"""

import json

import jax
import pytest

from tango_jax import bench
from tango_jax.planning import bench_phases
from tango_jax.planning.bench_phases import BenchOptions, open_bench
from tango_jax.planning.machines import GIB
from tango_jax.planning.targets import Target
from tango_jax.weights.presets import CONFIG_JSON, short_names

# A layer takes 240 FLOPs a token and 16 a query-key pair, the head 80 a token; a cached token takes 8 bytes in bf16.
# A layer has 120 weights, the head 40 (see test_flops_by_hand and test_bytes_by_hand).
TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 10, "hidden_size": 4,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 6,
    "tie_word_embeddings": True, "max_position_embeddings": 64, "hidden_act": "silu",
}  # fmt: skip
SPLIT = TINY | {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 16}
SETTINGS = ("max_prompt=3", "max_response=3", "row_buckets=(4,)", "rows_per_micro_batch=4", "mesh.fsdp=1")


def overrides(*settings: str) -> list[str]:
    return [f"--config.generator.{setting}" for setting in (*SETTINGS, *settings)]



@pytest.fixture
def model(tmp_path, monkeypatch):
    """Writes a config.json and names its folder; nothing here is as slow as measuring a machine."""
    monkeypatch.setattr(bench, "configure", lambda config: "")
    # A CPU of 1000 FLOP/s, of which half is predicted to be reached, and of 2000 bytes/s, of which 0.7 is.
    target = Target("cpu", "cpu", 1.0, 1e3, 1e3, 1e3, 2e3, 1e3, 1e3, 1e3, per_host=8)
    monkeypatch.setattr(bench_phases, "target_here", lambda: target)

    def write(settings: dict) -> str:
        (tmp_path / "config.json").write_text(json.dumps(settings))
        return f"--model={tmp_path}"

    return write


def test_each_phase_with_work_by_hand(model, capsys):
    bench.main([model(TINY), "--layers=1", *overrides("model.compute_dtype=bfloat16"), "--runs=1", "--json"])
    said = capsys.readouterr()
    assert said.err.startswith("sizes: 1 layers in bfloat16, head in float32, attention xla, mesh data 1 x fsdp 1 x ")
    report, phases = json.loads(said.out), json.loads(said.out)["phases"]
    assert report["jax"] == jax.__version__ and report["machine"]["target"] == "cpu"
    assert report["model"]["layers"] == 1 and report["model"]["parameters"] == 120 + 40
    assert report["sizes"] == {
        "rows": 4, "samples": 4, "prompt": 3, "new": 3, "micro_batches": 2,
        "micro_batch": {"rows": 4, "row_length": 4, "prefixes": 1, "prefix_length": 3},
    }  # fmt: skip
    # Prefill: a prompt of 3 tokens and 2 x 3 pairs. Decode: 2 steps of 4 rows, each with the 3 + 3 keys that the cache
    # has room for. Score: 2 micro-batches of 3 + 16 tokens, of which 16 are scored; 3 x 3 and 16 x (3 + 4) pairs. An
    # update takes three times that, and once more all products of a layer but the last, 2 x 4 x 6 a token.
    layers = {"prefill": 3 * 240 + 9 * 16, "decode": 2 * (4 * 240 + 24 * 16), "score": 2 * (19 * 240 + 121 * 16)}
    layers["update"] = 4 * layers["score"] - 2 * 19 * 48
    heads = {"prefill": 80, "decode": 2 * 4 * 80, "score": 2 * 16 * 80, "update": 3 * 2 * 16 * 80}
    assert list(phases) == ["prefill", "decode", "score", "update", "optimizer"]
    for name, found in phases.items():
        assert found["seconds"] > 0 and found["memory_gib"] > 0
        if name != "optimizer":
            assert found["flops"] == layers[name] + heads[name], name
            needed = (layers[name] + heads[name]) / 1000
            assert found["share_of_peak"] * found["seconds"] == pytest.approx(needed), name
    assert [found["tokens"] for found in phases.values()] == [3, 8, 30, 30, 0]
    # Predicted: products at half of the rate, bytes at 0.7 of it, and 10 us a layer of a decode step; in all of its
    # parts products take longer than reads.
    predicted = {name: (layers[name] + heads[name]) / 500 for name in layers}
    predicted["decode"] += 2 * 10e-6
    params = 4 * (120 + 40 + 3 * 4)  # with norms; counters come on top
    predicted["optimizer"] = (2 * 3 * params + 2 * params) / 1400
    predicted["update"] += predicted["optimizer"]
    assert {name: found["predicted_s"] for name, found in phases.items()} == pytest.approx(predicted, rel=0.05)


def test_adapters_on_a_frozen_base_by_hand(model, capsys):
    adapters = ("model.compute_dtype=bfloat16", "model.lora.rank=2", "model.lora.base_dtype=int8")
    bench.main([model(TINY), "--layers=1", *overrides(*adapters), "--only=update", "--runs=1", "--json"])
    said = capsys.readouterr()
    assert said.err.startswith("sizes: 1 layers in bfloat16, adapters of rank 2 on a frozen base, head in float32, ")
    report, phases = json.loads(said.out), json.loads(said.out)["phases"]
    # Inputs and outputs of the matrices: q 4 + 4, k and v 4 + 2, o 4 + 4, gate, up and down 4 + 6, which is 58.
    assert report["model"]["trained_parameters"] == 2 * 58 and report["model"]["lora_rank"] == 2
    layers, head, adapters = 2 * (19 * 240 + 121 * 16), 2 * 16 * 80, 2 * 19 * (2 * 2 * 58)
    # No gradients of the frozen matrices, 240 a token, or of the head; with remat=full, all but the last product again.
    needed = 3 * layers - 2 * 19 * 240 + 3 * adapters
    assert phases["update"]["flops"] == needed + layers - 2 * 19 * 48 + 2 * head


def test_a_mesh_of_eight_devices_and_text(model, capsys):
    mesh = ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2", "mesh.decode_tensor=2")
    given = overrides(*mesh, "row_buckets=(8,)", "model.remat=none")
    bench.main([model(SPLIT), *given, "--only=decode,update", "--runs=1"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["sizes", "decode", "update"]
    assert "mesh data 2 x fsdp 2 x tensor 2; sampling 16 rows (4 prompts of 3 tokens x 4 samples of 3)" in lines[0]
    assert " on each of 4 shard(s)" in lines[0]
    assert "% of the peak); " in lines[1] and ", predicted " in lines[1]


def test_sizes_follow_from_memory():
    options = BenchOptions("smollm2_135m_instruct", layers=2, overrides=("generator.mesh.fsdp=1",))
    large, small = (open_bench(options, memory) for memory in (32 * GIB, GIB))
    config = large.policy.config
    assert (large.rows, large.samples, config.max_prompt, config.max_response) == (16, 4, 64, 32)
    assert small.rows < large.rows and small.policy.config.rows_per_micro_batch < 4


def test_every_preset_has_a_short_name():
    assert set(short_names().values()) == set(CONFIG_JSON)
    assert short_names()["llama_3_1_8b_instruct"] == "meta-llama/Llama-3.1-8B-Instruct"


def test_mistakes_end_in_one_line(model, capsys, monkeypatch):
    tiny, big, alone = model(TINY), "--model=qwen2_5_1_5b", "--config.generator.mesh.fsdp=1"
    monkeypatch.setattr(bench, "device_memory", lambda: 8 * GIB)
    for arguments, message in [
        (["--layers=4"], "--layers goes with --model, and the reference shapes are fixed"),
        ([alone], "--config.generator.mesh.fsdp=1 goes with --model, and the reference shapes are fixed"),
        (["--only=decode"], "--only=decode: choose from R1, R2, R3, R4, R5"),
        ([tiny, "--rows=4"], "unknown argument '--rows=4'"),
        ([tiny, "--only=R1"], "--only=R1: choose from prefill, decode, score, update, optimizer"),
        (["--model=qwen9"], "--model=qwen9 is neither a preset nor a folder: choose one of qwen2_5_math_7b, "),
        ([big, "--layers=29"], "--layers=29 is more than the 28 of Qwen/Qwen2.5-1.5B"),
        ([big, "--layers=0"], "--layers=0 must be at least 1"),
        ([tiny, "--config.verifier.max_prompt=4"], "the generator alone is timed: --config.generator.key=value"),
        ([tiny, alone, "--config.generator.max_respose=4"], "did you mean generator.max_response"),
        ([tiny, alone, "--config.generator.max_response=0"], "generator.max_response=0 must be at least 1"),
        ([tiny, alone, "--config.generator.max_prompt=60"], "exceeds the 64 positions of"),
        ([tiny], "mesh fsdp=8 does not divide the model's width=4"),
        ([tiny, alone, "--config.generator.model.attention=splash"], "runs on a tpu, and the devices are of platform"),
        ([big, alone], "parameters, optimizer states and references of both roles take 17.3 GiB of each device"),
    ]:  # fmt: skip
        with pytest.raises(SystemExit) as stopped:
            bench.main(arguments)
        assert stopped.value.code == 2, arguments
        said = capsys.readouterr()
        assert message in said.err, (arguments, said.err)
        assert said.out == "" and len(said.err.splitlines()) == 1, said.err


def test_a_program_that_needs_too_much_is_not_started(model, capsys, monkeypatch):
    monkeypatch.setattr(bench, "device_memory", lambda: 6000)  # room for the state, by the estimate
    with pytest.raises(SystemExit) as stopped:
        bench.main([model(TINY), *overrides("row_buckets=(64,)"), "--only=prefill"])
    assert stopped.value.code == 2
    assert "prefill needs 0.0 GiB of each device, which has 0.0 GiB: lower --layers, " in capsys.readouterr().err
