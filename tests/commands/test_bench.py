"""`python -m tango_jax.bench --model=...`: counted work by hand, sizes from memory, and mistakes in one line.

Seconds are whatever they are; the rates that shares refer to are given here instead of measured.
"""

import json

import jax
import pytest

from tango_jax import bench
from tango_jax.planning import bench_phases, bench_sizes
from tango_jax.planning.bench_phases import DeviceRates, Timed, figures
from tango_jax.planning.bench_sizes import BenchOptions, Sizes, choose_sizes, open_model
from tango_jax.planning.bench_work import PhaseWork
from tango_jax.planning.costs import Flops
from tango_jax.planning.machines import GIB, Machine
from tango_jax.weights.presets import CONFIG_JSON, short_names

# A layer takes 240 FLOPs a token and 16 a query-key pair, the head 80 a token; a cached token takes 8 bytes in bf16.
# A layer has 120 weights, the head 40 (see test_flops_by_hand and test_bytes_by_hand).
TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 10, "hidden_size": 4,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 6,
    "tie_word_embeddings": True, "max_position_embeddings": 64, "hidden_act": "silu",
}  # fmt: skip
SPLIT = TINY | {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 16}


@pytest.fixture
def model(tmp_path, monkeypatch):
    """Writes a config.json and names its folder; nothing here is as slow as measuring a machine."""
    monkeypatch.setattr(bench, "configure", lambda config: "")
    monkeypatch.setattr(bench_phases, "matmul_rate", lambda dtype, precision=None, size=0: 500.0 if precision else 1e3)
    monkeypatch.setattr(bench_phases, "copy_rate", lambda size: 2000.0)

    def write(settings: dict) -> str:
        (tmp_path / "config.json").write_text(json.dumps(settings))
        return f"--model={tmp_path}"

    return write


def test_each_phase_with_work_by_hand(model, capsys):
    sizes = ("--layers=1", "--rows=4", "--samples=2", "--prompt=3", "--new=3", "--micro_rows=2", "--mesh=fsdp:1")
    bench.main([model(TINY), *sizes, "--runs=1", "--json"])
    said = capsys.readouterr()
    assert said.err.startswith("sizes: 1 layers in bfloat16, head in float32, attention xla, mesh data 1 x fsdp 1 x ")
    report, phases = json.loads(said.out), json.loads(said.out)["phases"]
    assert report["jax"] == jax.__version__ and report["machine"]["copy_bytes_per_s"] == 2000
    assert report["model"]["layers"] == 1 and report["model"]["parameters"] == 120 + 40
    assert report["sizes"]["micro_batch"] == {"rows": 2, "row_length": 4, "prefixes": 1, "prefix_length": 3}
    assert report["sizes"]["micro_batches"] == 2 and report["sizes"]["prompts"] == 2
    # Prefill: 2 prompts of 3 tokens and 9 pairs. Decode: 2 steps of 4 rows, each with the 3 + 3 keys that the cache has
    # room for. Score: 2 micro-batches of 3 + 8 tokens, of which 8 are scored; 3 x 3 and 8 x (3 + 4) pairs. An update
    # takes three times that, and once more all products of a layer but the last, 2 x 4 x 6 a token.
    layers = {"prefill": 6 * 240 + 18 * 16, "decode": 2 * (4 * 240 + 24 * 16), "score": 2 * (11 * 240 + 65 * 16)}
    layers["update"] = 4 * layers["score"] - 2 * 11 * 48
    heads = {"prefill": 2 * 80, "decode": 2 * 4 * 80, "score": 2 * 8 * 80, "update": 3 * 2 * 8 * 80}
    weights = 2 * 120 + 4 * 40
    moved = {"prefill": weights + 6 * 8, "decode": 2 * (weights + (6 + 12) * 8), "score": 2 * weights}
    assert list(phases) == ["prefill", "decode", "score", "update", "optimizer"]
    for name, found in phases.items():
        assert found["seconds"] > 0 and found["memory_gib"] > 0
        if name != "optimizer":
            assert found["flops"] == layers[name] + heads[name], name
            needed = layers[name] / 1000 + heads[name] / 500
            assert found["share_of_matmul"] * found["seconds"] == pytest.approx(needed), name
        if name in moved:
            assert found["bytes"] == moved[name], name
        assert found["share_of_copy"] * found["seconds"] == pytest.approx(found["bytes"] / 2000), name
    assert [found["tokens"] for found in phases.values()] == [6, 8, 18, 18, 0]
    assert phases["update"]["mfu"] * phases["update"]["seconds"] == pytest.approx(
        3 * (layers["score"] / 1000 + heads["score"] / 500))  # fmt: skip
    # Predicted: products at half of the measured rates, bytes at 0.7 of the copy rate, and 10 us a layer of a decode
    # step; in all of its parts products take longer than reads.
    predicted = {name: layers[name] / 500 + heads[name] / 250 for name in layers}
    predicted["decode"] += 2 * 10e-6
    predicted["optimizer"] = phases["optimizer"]["bytes"] / 1400
    predicted["update"] += predicted["optimizer"]
    assert {name: found["predicted_s"] for name, found in phases.items()} == pytest.approx(predicted)
    assert report["machine"]["predicted_for"] == "cpu"
    params = 4 * (120 + 40 + 3 * 4)  # with norms; counters come on top
    assert 2 * 3 * params + 2 * params < phases["optimizer"]["bytes"] < 2 * 3 * params + 2 * params + 100
    gradients = phases["update"]["bytes"] - phases["optimizer"]["bytes"]
    assert gradients == 2 * (3 * weights + 2 * params)


def test_adapters_on_a_frozen_base_by_hand(model, capsys):
    sizes = ("--layers=1", "--rows=4", "--samples=2", "--prompt=3", "--new=3", "--micro_rows=2", "--mesh=fsdp:1")
    bench.main([model(TINY), *sizes, "--lora_rank=2", "--base_dtype=int8", "--runs=1", "--json"])
    said = capsys.readouterr()
    assert said.err.startswith("sizes: 1 layers in bfloat16, adapters of rank 2 on a frozen base, head in float32, ")
    report, phases = json.loads(said.out), json.loads(said.out)["phases"]
    # Inputs and outputs of the matrices: q 4 + 4, k and v 4 + 2, o 4 + 4, gate, up and down 4 + 6, which is 58.
    assert report["model"]["trained_parameters"] == 2 * 58 and report["model"]["lora_rank"] == 2
    layers, head, adapters = 2 * (11 * 240 + 65 * 16), 2 * 8 * 80, 2 * 11 * (2 * 2 * 58)
    # No gradients of the frozen matrices, 240 a token, or of the head; with remat=full, all but the last product again.
    needed = 3 * layers - 2 * 11 * 240 + 3 * adapters
    assert phases["update"]["flops"] == needed + layers - 2 * 11 * 48 + 2 * head
    assert phases["update"]["mfu"] * phases["update"]["seconds"] == pytest.approx(needed / 1000 + 2 * head / 500)
    state = 4 * 3 * (2 * 58)  # A and B with both moments; counters come on top
    assert 2 * state + 2 * state / 3 < phases["optimizer"]["bytes"] < 2 * state + 2 * state / 3 + 100


def test_a_mesh_of_eight_devices_and_text(model, capsys, monkeypatch):
    monkeypatch.setattr(bench_phases, "peak_memory", lambda: 2**29)
    sizes = ("--rows=8", "--prompt=3", "--new=3", "--micro_rows=1", "--dtype=float32", "--remat=none")
    bench.main([model(SPLIT), *sizes, "--mesh=data:2,fsdp:2,tensor:2,decode_tensor:2", "--only=decode,update",
                "--runs=1"])  # fmt: skip
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["sizes", "machine", "decode", "update",
                                                      "the most memory in use on a device"]  # fmt: skip
    assert "mesh data 2 x fsdp 2 x tensor 2, decoding weights on 2 device(s) each" in lines[0]
    assert "8 rows (4 prompts of 3 tokens x 2 samples of 3)" in lines[0] and " on each of 4 shard(s)" in lines[0]
    assert "% of the copy rate); " in lines[2] and "0.5 of " in lines[-1]


def test_figures_by_hand():
    rates = DeviceRates(matmul=100.0, head=50.0, copy=10.0)
    work = PhaseWork(tokens=60, flops=Flops(400.0, 100.0), bytes=30.0, needed=Flops(300.0, 100.0))
    found = figures(work, Timed(seconds=12.0, compile_s=3.0, memory=2**31), rates)
    assert found["tokens_per_s"] == 5 and found["flops_per_s"] == 500 / 12 and found["bytes_per_s"] == 2.5
    assert found["share_of_matmul"] == 6 / 12  # 400 / 100 + 100 / 50 seconds of 12
    assert found["mfu"] == 5 / 12 and found["share_of_copy"] == 3 / 12
    assert found["compile_s"] == 3 and found["memory_gib"] == 2


def test_sizes_follow_from_memory():
    options = BenchOptions("qwen2_5_1_5b", layers=4)
    # 420.6 M parameters: 5.0 GB with both moments, and 1.7 GB to sample with, of which the float32 head is 0.9.
    small = open_model(options)
    assert (small.num_layers, small.width, small.compute_dtype, small.head_dtype) == (4, 1536, "bfloat16", "float32")
    whole = Sizes(rows=256, samples=8, prompt=512, new=512, micro_rows=16, logp_chunk=256)
    assert choose_sizes(options, small, Machine("gpu", 1, 132 * GIB)) == whole
    assert choose_sizes(options, small, Machine("gpu", 1, 8 * GIB)) == whole._replace(rows=32, micro_rows=1)
    assert choose_sizes(options, small, Machine("gpu", 8, 132 * GIB)) == whole  # 32 rows on each of 8 devices
    given = options._replace(rows=64, samples=1, prompt=2048, new=1024, micro_rows=4, logp_chunk=1024)
    assert choose_sizes(given, small, Machine("gpu", 1, 8 * GIB)) == Sizes(64, 1, 2048, 1024, 4, 1024)
    on_cpu = choose_sizes(options, small, Machine("cpu", 1, 64 * GIB))
    assert on_cpu == Sizes(rows=8, samples=8, prompt=64, new=32, micro_rows=8, logp_chunk=32)


def test_every_preset_has_a_short_name():
    assert set(short_names().values()) == set(CONFIG_JSON)
    assert short_names()["llama_3_1_8b_instruct"] == "meta-llama/Llama-3.1-8B-Instruct"


def test_mistakes_end_in_one_line(model, capsys, monkeypatch):
    tiny, big = model(TINY), "--model=qwen2_5_1_5b"
    monkeypatch.setattr(bench, "device_memory", lambda: 8 * GIB)
    for arguments, message in [
        (["--rows=4"], "--rows is an option of --model, and the reference shapes are fixed"),
        (["--only=decode"], "--only=decode: choose from R1, R2, R3, R4, R5"),
        ([tiny, "--only=R1"], "--only=R1: choose from prefill, decode, score, update, optimizer"),
        (["--model=qwen9"], "--model=qwen9 is neither a preset nor a folder: choose one of qwen2_5_math_7b, "),
        ([big, "--layers=29"], "--layers=29 is more than the 28 of Qwen/Qwen2.5-1.5B"),
        ([tiny, "--rows=0", "--new=1"], "--rows=0 must be at least 1"),
        ([tiny, "--new=1"], "--new=1 must be at least 2"),
        ([tiny, "--mesh=fsdp:1", "--prompt=60", "--new=5"],
         "--prompt=60 and --new=5 are 65 tokens, more than the 64 positions"),
        ([tiny, "--mesh=fsdp:1", "--rows=3", "--samples=2"], "--rows=3 must be a multiple of 2: 2 samples of a prompt"),
        ([tiny], "--mesh=fsdp:-1: mesh fsdp=8 does not divide the model's width=4"),
        ([tiny, "--mesh=rows:2"], "--mesh=rows:2: 'rows:2' is not AXIS:SIZE"),
        ([tiny, "--mesh=fsdp:x"], "--mesh=fsdp:x: 'fsdp:x' is not AXIS:SIZE"),
        ([tiny, "--mesh=fsdp:16"], "--mesh=fsdp:16: mesh axes data=1, fsdp=16, tensor=1 need 16 devices"),
        ([tiny, "--mesh=fsdp:1,tensor:2"], "does not divide the model's num_kv_heads=1"),
        ([tiny, "--mesh=fsdp:1", "--attention=splash"], "runs on a tpu, and the devices are of platform cpu"),
        ([tiny, "--mesh=fsdp:1", "--decode_attention=paged"], "runs on a tpu, and the devices are of platform cpu"),
        ([tiny, "--mesh=fsdp:1", "--lora_rank=7"], "--lora_rank=7: lora.rank=7 is above 2, the narrowest side of a "),
        ([tiny, "--base_dtype=int8"], "--base_dtype=int8 is that of a base with adapters: add --lora_rank=N"),
        ([big, "--mesh=fsdp:1"], "an update takes at least 23.0 GiB of each device (17.3 of parameters and moments, "),
        ([big, "--mesh=fsdp:1", "--layers=1", "--rows=8192", "--new=4096"],
         "sampling 8192 rows of 64 + 4096 tokens takes at least "),
    ]:  # fmt: skip
        with pytest.raises(SystemExit) as stopped:
            bench.main(arguments)
        assert stopped.value.code == 2, arguments
        said = capsys.readouterr()
        assert message in said.err, (arguments, said.err)
        assert said.out == "" and len(said.err.splitlines()) == 1 + ("--rows=0" in arguments)


def test_a_program_that_needs_too_much_is_not_started(model, capsys, monkeypatch):
    monkeypatch.setattr(bench_sizes, "check_memory", lambda job, sizes, machine: None)
    monkeypatch.setattr(bench, "device_memory", lambda: 1000)
    sizes = ("--rows=2", "--prompt=3", "--new=3", "--micro_rows=1", "--mesh=fsdp:1")
    with pytest.raises(SystemExit) as stopped:
        bench.main([model(TINY), *sizes, "--only=prefill"])
    assert stopped.value.code == 2
    assert "prefill needs 0.0 GiB of each device, which has 0.0 GiB: lower --rows, " in capsys.readouterr().err
