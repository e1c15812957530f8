"""Opening of published checkpoints by name: a Hugging Face folder, a hub id or a GGUF file. It reads no weights."""

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from ml_collections import ConfigDict

from tango_jax.models.lora import LoraConfig
from tango_jax.models.transformer import ModelConfig
from tango_jax.runtime import hub
from tango_jax.runtime.checks import local_path, require
from tango_jax.runtime.failures import typed_command
from tango_jax.runtime.unread import load_all
from tango_jax.text import hf_tokenizer
from tango_jax.text.tokenizer import Tokenizer
from tango_jax.weights import safetensors_files
from tango_jax.weights.from_gguf import model_config_from_gguf, open_gguf_params
from tango_jax.weights.from_hf import model_config_from_hf, open_hf, resolve_folder
from tango_jax.weights.gguf_file import GgufFile, open_gguf
from tango_jax.weights.gguf_tokenizer import gguf_tokenizer, write_hf_tokenizer
from tango_jax.weights.hf_layout import score_heads
from tango_jax.weights.model_card import licence_of
from tango_jax.weights.presets import REWARD_MODELS, preset_model
from tango_jax.weights.prompting import read_prompting
from tango_jax.weights.to_hf import TOKENIZER_FILES

ONLY_JUDGES = ("is a process reward model, which judges steps and writes no text: it can only be the verifier of "
               "tango_jax.judge, of tango_jax.evaluate, or of an arm that does not train it (fixed_verifier)")
MIN_POSITIONS = 4096  # of a model from scratch
# Fields of ModelConfig that no checkpoint determines.
NUMERICS = (
    "param_dtype", "compute_dtype", "head_dtype", "head_precision", "remat", "unroll", "attention", "decode_attention",
    "sample_cache_dtype", "sample_weight_dtype",
)


def fields_of(role: ConfigDict) -> dict:
    """NUMERICS and adapters of a role's settings. A frozen base is loaded in the dtype in which it is kept."""
    fields, lora = {name: role.model[name] for name in NUMERICS if name != "head_dtype"}, role.model.lora
    if role.model.head_precision == "bfloat16":
        fields |= {"head_dtype": "bfloat16", "head_precision": "highest"}
    if not lora.rank:
        return fields
    if not role.sft.full:
        is_wide = lora.base_dtype in ("", "int8")
        fields["param_dtype"] = role.model.compute_dtype if is_wide else lora.base_dtype
    return fields | {"lora": LoraConfig(lora.rank, lora.alpha, tuple(lora.targets), lora.base_dtype)}


def sized_model(role: ConfigDict, vocab_size: int) -> ModelConfig:
    """The model of a role without a checkpoint. ValueError, see ModelConfig."""
    sizes = {name: value for name, value in role.model.items() if name != "lora"}
    width, heads = role.model.width, role.model.num_heads
    if width % heads:
        raise ValueError(f"num_heads={heads} does not divide width={width}: choose a number that does")
    positions = max(MIN_POSITIONS, role.max_prompt + role.max_response)
    return ModelConfig(vocab_size, head_dim=width // heads, max_position=positions, **sizes | fields_of(role))


@dataclasses.dataclass(frozen=True)
class Source:
    name: str
    model_config: ModelConfig
    tokenizer: Tokenizer  # with as many ids as the embedding has rows
    # (shardings=None) -> the tree of init_params, in model_config.param_dtype, of `Unread`; None: from scratch
    open_params: Callable[..., dict] | None
    write_tokenizer: Callable[[Path], None]  # writes the tokenizer's files into a folder, in Hugging Face format
    generation: dict  # contents of generation_config.json, with every stop id
    architecture: str | None = None  # model_type of an export; None: any that can hold the model
    base_model: str | None = None  # hub id without revision, for a model card
    licence: Mapping[str, str] = dataclasses.field(default_factory=dict)  # model_card.licence_of the checkpoint

    def load_params(self, shardings: dict | None = None) -> dict:
        return load_all(self.open_params(shardings))


def kind_of(name: str) -> str:
    """The kind of a checkpoint: gguf, workdir, folder or hub. The hub is not contacted.

    ValueError: none of them, or a missing folder: ., / or ~ in front, several slashes, or a folder as first part.
    """
    path = local_path("checkpoint", name)
    if path.is_file() or path.suffix == ".gguf":
        if not path.is_file():
            raise ValueError(f"checkpoint {name} does not exist; give the path of a .gguf file")
        return "gguf"
    if path.is_dir():
        return "workdir" if is_workdir(path) else "folder"
    hub_id, is_path = hub.parse_hub_id(name), name.startswith((".", "/", "~"))
    if is_path or _looks_local(name):
        on_hub = "" if is_path or hub_id is None else f"; a model of the hub is {name}@COMMIT"
        raise ValueError(f"checkpoint {name}: there is no such folder{_runs_beside(path)}; give a run's workdir, a "
                         f"Hugging Face folder or a .gguf file{on_hub}")
    if hub_id is None:
        raise ValueError(f"checkpoint {name!r} is neither a .gguf file nor a folder nor a hub id such as Qwen/Qwen3-8B")
    return "hub"


def _looks_local(name: str) -> bool:
    """Whether a missing relative name, without a revision, probably meant a folder."""
    first, slash, rest = name.partition("/")
    return "@" not in name and bool(slash) and ("/" in rest or Path(first).is_dir())


def _runs_beside(path: Path) -> str:
    try:
        runs = sorted(str(other) for other in path.parent.iterdir() if is_workdir(other))
    except OSError:  # there is no such folder either, or it may not be read
        runs = []
    return f" (runs beside it: {safetensors_files.shorten(runs)})" if runs else ""


def is_workdir(path: Path) -> bool:
    """Whether a folder's config.json holds a run's settings."""
    try:
        settings = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False  # the function that reads the folder next reports the error
    return isinstance(settings, dict) and "task.name" in settings and "model_type" not in settings


def open_source(
    name: str, use_chat: bool | None = False, reads_weights: bool = True, takes_scores: bool = False, **numerics
) -> Source:
    """Open a folder, a hub id (downloaded) or a .gguf file. ValueError: it is missing or not supported.

    `use_chat` (chat template) None: as in the run that exported it, or no. `reads_weights` False: sizes and tokenizer.
    `takes_scores`: a process reward model, which writes no text, will do.
    """
    kind = kind_of(name)
    if kind == "workdir":
        raise ValueError(f"{name} is the workdir of a run, but a published checkpoint is expected here: give one, or "
                         f"export the run first ({typed_command('export')})")
    if kind == "gguf":
        return _open_gguf_source(open_gguf(Path(name).expanduser()), name, bool(use_chat), numerics)
    folder = resolve_folder(name)
    _check_files(folder, reads_weights)
    if use_chat is None:
        prompting = read_prompting(folder)
        use_chat = prompting is not None and prompting.use_chat
    config = model_config_from_hf(folder, **numerics)
    require(takes_scores or not config.score_head, f"{name} {ONLY_JUDGES}")
    is_of_trl = config.score_head == "linear"
    tokenizer = hf_tokenizer.load_hf_tokenizer(folder, config.vocab_size, use_chat, always_bos=is_of_trl)
    file = folder / "generation_config.json"
    own, ids = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}, generation_of(tokenizer)
    return Source(
        name=name,
        model_config=config,
        tokenizer=tokenizer,
        open_params=lambda shardings=None: open_hf(folder, config, shardings),
        write_tokenizer=lambda target: copy_tokenizer(folder, target),
        generation=ids | own | {"eos_token_id": ids["eos_token_id"]},
        architecture=json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"],
        base_model=hub.parse_hub_id(name).repo if kind == "hub" else None,
        licence=licence_of(folder),
    )


def _check_files(folder: Path, reads_weights: bool) -> None:
    lacking = [] if (folder / "config.json").is_file() else ["config.json"]
    lacking += [] if hf_tokenizer.has_tokenizer(folder) else ["tokenizer.json (or tokenizer.model)"]
    instead = safetensors_files.instead_of_weights(folder) if reads_weights else None
    lacking += [] if instead is None else [safetensors_files.WEIGHT_FILES]
    if lacking:
        raise ValueError(f"{folder} lacks {', '.join(lacking)}: copy what is missing from the model's page"
                         f"{instead or ''}")


def published_model(name: str, **numerics) -> ModelConfig:
    """Sizes of a folder, a .gguf file or a known hub id. Nothing is downloaded. ValueError: unknown, unsupported."""
    kind = kind_of(name)
    if kind == "gguf":
        return model_config_from_gguf(open_gguf(Path(name).expanduser()), **numerics)
    if kind == "hub":
        return preset_model(hub.parse_hub_id(name).repo, **numerics)  # whose sizes no revision changes
    return model_config_from_hf(Path(name).expanduser(), **numerics)


def score_head_of(name: str) -> str:
    """ModelConfig.score_head of a folder or of a known hub id; "" of anything else, and of what cannot be read."""
    try:
        hub_id, file = hub.parse_hub_id(name), Path(name).expanduser() / "config.json"
        if not name:
            return ""
        raw = REWARD_MODELS[hub_id.repo] if hub_id and not file.is_file() else json.loads(file.read_text("utf-8"))
        heads = score_heads(raw["model_type"])
        return next((heads[one] for one in raw["architectures"] if one in heads), "")
    except (OSError, ValueError, LookupError, TypeError, RuntimeError):  # the last: ~ without a home
        return ""


def has_chat_template(name: str) -> bool:
    """Whether a published checkpoint has a chat template. A hub id is downloaded. ValueError: missing."""
    if kind_of(name) == "gguf":
        return bool(open_gguf(Path(name).expanduser()).get("tokenizer.chat_template"))
    return hf_tokenizer.has_chat_template(resolve_folder(name))


def _open_gguf_source(file: GgufFile, name: str, use_chat: bool, numerics: dict) -> Source:
    config, tokenizer = model_config_from_gguf(file, **numerics), gguf_tokenizer(file, use_chat)
    return Source(
        name=name,
        model_config=config,
        tokenizer=tokenizer,
        open_params=lambda shardings=None: open_gguf_params(file, config, shardings),
        write_tokenizer=lambda target: write_hf_tokenizer(file, target),
        generation=generation_of(tokenizer),
        architecture=file.require("general.architecture"),
        licence={"license": licence} if (licence := file.get("general.license")) else {},
    )


def generation_of(tokenizer: Tokenizer) -> dict:
    """Token ids for generation_config.json: one stop id as a number, several as a list."""
    stop_ids = list(tokenizer.stop_ids)
    bos = {"bos_token_id": tokenizer.bos_ids[0]} if tokenizer.bos_ids else {}
    return {"eos_token_id": stop_ids if len(stop_ids) > 1 else stop_ids[0]} | bos


def copy_tokenizer(folder: Path, target: Path) -> None:
    for name in TOKENIZER_FILES:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, target / name)
