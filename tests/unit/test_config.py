"""The configuration files that come with raydix, and what a person who writes one is told."""

import warnings
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from raydix.configs import Config, load_config
from raydix.configs.load import CONFIG_FOLDER
from raydix.configs.sections import manager_arguments
from raydix.configs.settings import answer_bytes, engine_settings, objectives, tenants
from raydix.engine.core.errors import StartupError
from raydix.engine.core.objectives import Objectives, WhenLate
from raydix.engine.core.settings import DraftLimits
from raydix.engine.core.tenants import Tenant, key_hash
from raydix.engine.core.types import DraftSource

with warnings.catch_warnings():
    # Ray's own modules use a deprecated spelling of pydantic's when they are imported.
    warnings.simplefilter("ignore", DeprecationWarning)
    from ray.serve.schema import ServeDeploySchema

SERVE = CONFIG_FOLDER / "serve.yaml"
FILES = sorted(CONFIG_FOLDER.glob("*.yaml"))
OWN_FILES = [file for file in FILES if file != SERVE]
MIXED: dict[str, Any] = {"workers": {"mixed": {}}}


def load(tmp_path: Path, content: Any, overrides: dict[str, Any] | None = None) -> Config:
    file = tmp_path / "config.yaml"
    file.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return load_config(file, overrides)


def complaint(tmp_path: Path, content: Any) -> str:
    with pytest.raises(StartupError) as caught:
        load(tmp_path, content)
    message = str(caught.value)
    assert "config.yaml" in message and "\n" not in message, "one line that names the file"
    return message


def sections(model: type[BaseModel] = Config) -> list[type[BaseModel]]:
    """All parts of the schema."""
    found = [model]
    for field in model.model_fields.values():
        for option in (field.annotation, *get_args(field.annotation)):
            if isinstance(option, type) and issubclass(option, BaseModel):
                found += sections(option)
    return found


# The files


def test_there_are_files() -> None:
    assert {"cpu.yaml", "cpu_mixed.yaml", "serve.yaml"} <= {file.name for file in FILES}


@pytest.mark.parametrize("file", OWN_FILES, ids=lambda file: file.stem)
def test_every_file_loads_by_path_and_by_name(file: Path) -> None:
    config = load_config(file)
    assert load_config(file.name) == load_config(file.stem) == config


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_file_says_what_it_is_for(file: Path) -> None:
    assert file.read_text().startswith("# ")


def unknown_keys(content: Any, schema: Any, path: str = "") -> list[str]:
    """Keys that Serve's schema does not have; Serve itself ignores them."""
    if isinstance(content, list):
        [item] = get_args(schema)
        return [key for index, value in enumerate(content) for key in unknown_keys(value, item, f"{path}[{index}]")]
    models = [option for option in (schema, *get_args(schema)) if hasattr(option, "model_fields")]
    if not isinstance(content, dict) or not models:
        return []
    fields = models[0].model_fields
    unknown = [f"{path}.{key}" for key in content if key not in fields]
    for key in content.keys() & fields.keys():
        unknown += unknown_keys(content[key], fields[key].annotation, f"{path}.{key}")
    return unknown


def test_the_serve_file_is_what_serve_understands() -> None:
    content = yaml.safe_load(SERVE.read_text())
    ServeDeploySchema.model_validate(content)
    assert unknown_keys(content, ServeDeploySchema) == []
    content["applications"][0]["route_prefixes"] = "/"
    content["http_options"]["prt"] = 1
    assert sorted(unknown_keys(content, ServeDeploySchema)) == [".applications[0].route_prefixes", ".http_options.prt"]


def test_the_serve_file_deploys_a_configuration_of_ours() -> None:
    [application] = yaml.safe_load(SERVE.read_text())["applications"]
    assert application["import_path"] == "raydix.serve_app:build"
    arguments = application["args"]
    assert arguments.keys() <= {"config", "overrides"}
    assert load_config(arguments["config"], arguments.get("overrides")).workers


# The schema


@pytest.mark.parametrize("section", sections(), ids=lambda section: section.__name__)
def test_every_field_has_a_sentence(section: type[BaseModel]) -> None:
    assert section.__doc__
    assert section.model_config["frozen"] and section.model_config["extra"] == "forbid"
    for name, field in section.model_fields.items():
        assert field.description and field.description.endswith("."), name


@pytest.mark.parametrize("section", sections(), ids=lambda section: section.__name__)
def test_the_documents_show_every_default(section: type[BaseModel]) -> None:
    """The tables of keys are made of the schema, which has no default that a function makes."""
    described = section.model_json_schema()["properties"]
    for name, field in section.model_fields.items():
        value = field.get_default(call_default_factory=True)
        # Sections have tables of their own, and an empty mapping is shown as empty.
        if not field.is_required() and not isinstance(value, BaseModel) and value != {}:
            assert "default" in described[name], name


def test_defaults_are_within_their_own_bounds(tmp_path: Path) -> None:
    config = load(tmp_path, MIXED)
    assert Config.model_validate(config.model_dump()) == config


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"workrs": {}}, "unknown key 'workrs', did you mean 'workers'?"),
        ({"workers": {"mixd": {}}}, "unknown key 'workers.mixd', did you mean 'mixed'?"),
        ({"workers": {"mixed": {"replica": 2}}}, "unknown key 'workers.mixed.replica', did you mean 'replicas'?"),
        ({**MIXED, "cache": {"blocksize": 16}}, "unknown key 'cache.blocksize', did you mean 'block_size'?"),
        (
            {**MIXED, "logging": {"stimuli": "x"}},
            "logging.stimuli is no longer a key: logging.recording records requests",
        ),
        (
            {**MIXED, "speculation": {"draft_model": "org/small"}},
            "speculation.draft_model is no longer a key: there are no drafts of a smaller model",
        ),
        ({**MIXED, "http": {"zzz": 1}}, "unknown key 'http.zzz', valid keys: host, port"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_valid_one(tmp_path: Path, content: Any, expected: str) -> None:
    assert expected in complaint(tmp_path, content)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("cache", "block_size", 4),
        ("cache", "block_size", 256),
        ("cache", "dtype", "fp8"),
        ("cache", "num_blocks", 1),
        ("cache", "pool_gib", 0),
        ("cache", "segment_gib", -1),
        ("cache", "disk_gib", -1),
        ("cache", "disk_path", ""),
        ("cache", "swap_gib", -1),
        ("cache", "await_timeout_s", 0),
        ("http", "port", 65536),
        ("http", "host", ""),
        ("ingress", "replicas", 0),
        ("ingress", "max_body_bytes", 10),
        ("model", "dtype", "int8"),
        ("model", "quantization", "int4"),
        ("model", "max_model_len", 8),
        ("model", "source", ""),
        ("placement", "import_gib_per_s", 0),
        ("placement", "piggyback_tokens", -1),
        ("slo", "ttft_ms", 0),
        ("slo", "tpot_ms", -5),
        ("slo", "tpot_ms", 4_000_000),
    ],
)
def test_a_value_out_of_bounds_is_named(tmp_path: Path, section: str, key: str, value: Any) -> None:
    assert f"{section}.{key}: " in complaint(tmp_path, {**MIXED, section: {key: value}})


@pytest.mark.parametrize(
    ("key", "value"),
    [("replicas", 0), ("token_budget", 8), ("max_requests", 0), ("device", "tpu"), ("num_cpus", 0), ("num_gpus", -1)],
)
def test_a_workers_value_out_of_bounds_is_named(tmp_path: Path, key: str, value: Any) -> None:
    assert f"workers.mixed.{key}: " in complaint(tmp_path, {"workers": {"mixed": {key: value}}})


def test_every_problem_is_named(tmp_path: Path) -> None:
    message = complaint(tmp_path, {**MIXED, "http": {"port": 0}, "cache": {"pool_gib": 0}})
    assert "http.port" in message and "cache.pool_gib" in message


def test_the_budget_covers_every_decode(tmp_path: Path) -> None:
    message = complaint(tmp_path, {"workers": {"mixed": {"token_budget": 32, "max_requests": 33}}})
    assert "workers.mixed: token_budget (32) must be at least max_requests (33)" in message
    load(tmp_path, {"workers": {"mixed": {"token_budget": 32, "max_requests": 32}}})


def test_quantized_weights_are_for_cpus(tmp_path: Path) -> None:
    model = {"quantization": "int8"}
    config = load(tmp_path, {**MIXED, "model": model})
    assert config.workers.mixed is not None
    assert engine_settings(config, config.workers.mixed).quantization == "int8"
    message = complaint(tmp_path, {"model": model, "workers": {"mixed": {"device": "cuda"}}})
    assert "model.quantization int8 is for CPUs, and a worker's device is cuda" in message


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_stored_weights_are_for_bfloat16(tmp_path: Path, dtype: str) -> None:
    message = complaint(tmp_path, {**MIXED, "model": {"quantization": "stored", "dtype": dtype}})
    assert f"model.quantization stored computes in bfloat16, and model.dtype is {dtype}" in message


def test_kv_in_eight_bits_is_for_cpus(tmp_path: Path) -> None:
    config = load(tmp_path, {**MIXED, "cache": {"dtype": "int8"}})
    assert config.workers.mixed is not None
    assert engine_settings(config, config.workers.mixed).kv_dtype == "int8"
    message = complaint(tmp_path, {"cache": {"dtype": "int8"}, "workers": {"mixed": {"device": "cuda"}}})
    assert "cache.dtype int8 is for CPUs, and a worker's device is cuda" in message


def test_drafts_are_made_unless_they_are_off(tmp_path: Path) -> None:
    def limits(**speculation: Any) -> DraftLimits | None:
        config = load(tmp_path, {**MIXED, "speculation": speculation})
        return engine_settings(config, config.workers.sections["mixed"]).drafts

    assert limits() == limits(mode="auto") is not None and limits(mode="off") is None
    assert limits(mode=False) is None, "as YAML reads off"
    assert limits(mode="auto", depth=3, memory_mib=1) == DraftLimits(3, 6144, 2048)
    own = limits(mode="auto", memory_mib=1, sources=["request", "grammar"])
    assert own == DraftLimits(15, 8192, 0, (DraftSource.REQUEST, DraftSource.GRAMMAR))
    with_cache = load(tmp_path, {**MIXED, "speculation": {"mode": "auto"}})
    without = with_cache.model_copy(update={"cache": with_cache.cache.model_copy(update={"prefix_caching": False})})
    found = engine_settings(without, without.workers.sections["mixed"]).drafts
    assert found is not None and found.past_tokens == 0 and DraftSource.PAST not in found.sources
    assert DraftSource.CLUSTER not in found.sources

    def memory(config: Config) -> int:
        return answer_bytes(manager_arguments(config))

    off = load(tmp_path, {**MIXED, "speculation": {"mode": "off"}})
    assert (memory(without), memory(with_cache), memory(off)) == (0, 16 << 20, 0)
    assert memory(load(tmp_path, {**MIXED, "speculation": {"mode": "auto", "sources": ["past"]}})) == 0
    assert memory(load(tmp_path, {**MIXED, "speculation": {"mode": "auto", "cluster_mib": 3}})) == 3 << 20
    assert "speculation.sources" in complaint(tmp_path, {**MIXED, "speculation": {"sources": ["dreams"]}})
    assert "speculation.mode" in complaint(tmp_path, {**MIXED, "speculation": {"mode": "on"}})


@pytest.mark.parametrize(
    ("roles", "is_valid"),
    [
        ((), False),
        (("prefill",), False),
        (("decode",), False),
        (("prefill", "mixed"), False),
        (("decode", "mixed"), False),
        (("mixed",), True),
        (("prefill", "decode"), True),
        (("prefill", "decode", "mixed"), True),
    ],
)
def test_which_roles_go_together(tmp_path: Path, roles: tuple[str, ...], is_valid: bool) -> None:
    content: dict[str, Any] = {"workers": {role: {} for role in roles}}
    if is_valid:
        load(tmp_path, content)
    else:
        assert "workers: " in complaint(tmp_path, content)


# Tenants


def complaint_about(tmp_path: Path, *tenants: dict[str, Any]) -> str:
    return complaint(tmp_path, {**MIXED, "tenants": list(tenants)})


def test_every_worker_may_swap_on_top_of_the_segments() -> None:
    workers = {"prefill": {"replicas": 2}, "decode": {}, "mixed": {"replicas": 3}}
    config = Config.model_validate({"workers": workers, "cache": {"segment_gib": 1.5, "swap_gib": 0.5}})
    assert config.stored_gib == 1.5 + 6 * 0.5
    assert engine_settings(config, config.workers.sections["mixed"]).swap_bytes == 1 << 29


def test_tenants_become_values_and_keys(tmp_path: Path) -> None:
    alice = {"name": "alice", "key_hashes": [key_hash("1"), key_hash("2")], "admin": True, "cache_min": 0.25}
    bob = {"name": "bob", "key_hashes": [key_hash("3")], "cache_min": 0.75, "cache_max": 0.9, "max_requests": 4}
    bob["min_priority"] = -2
    config = load(tmp_path, {**MIXED, "tenants": [alice, bob, {"name": "by-handle"}]})
    known = tenants(Config.model_validate(config.model_dump()))
    assert known.authenticate("Bearer 2") == Tenant("alice", is_admin=True, cache_min=0.25, min_priority=0)
    assert known.authenticate("Bearer 3") == Tenant(
        "bob", cache_min=0.75, cache_max=0.9, max_requests=4, min_priority=-2
    )
    assert known.named("by-handle") == Tenant("by-handle", min_priority=0)
    assert tenants(load(tmp_path, MIXED)).authenticate(None).name == "anonymous"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("name", ""),
        ("name", "a b"),
        ("name", "a" * 64),
        ("cache_min", -0.1),
        ("cache_min", 1.1),
        ("cache_max", 0),
        ("cache_max", 1.1),
        ("max_requests", 0),
        ("admin", "perhaps"),
        ("key_hashes", "0" * 64),
    ],
)
def test_a_tenant_s_value_out_of_bounds_is_named(tmp_path: Path, key: str, value: Any) -> None:
    assert f"tenants.1.{key}: " in complaint_about(tmp_path, {"name": "a"}, {"name": "b", key: value})


@pytest.mark.parametrize("wrong", ["", "rdx-secret", "0" * 63, "A" * 64, "0" * 65, "0" * 64 + "\n"])
def test_a_malformed_key_hash_is_named_and_not_repeated(tmp_path: Path, wrong: str) -> None:
    message = complaint_about(tmp_path, {"name": "a", "key_hashes": ["0" * 64, wrong]})
    assert "tenants.0.key_hashes.1: expected the SHA-256 of an API key" in message
    assert "secret" not in message


def test_an_unknown_key_of_a_tenant_is_named(tmp_path: Path) -> None:
    message = complaint_about(tmp_path, {"name": "a", "key_hash": []})
    assert "unknown key 'tenants.0.key_hash', did you mean 'key_hashes'?" in message


def test_what_two_tenants_cannot_both_have_is_named(tmp_path: Path) -> None:
    digest = "0" * 64
    assert "tenants: name 'a' is given twice" in complaint_about(tmp_path, {"name": "a"}, {"name": "a"})
    for others in ([{"name": "b", "key_hashes": [digest]}], []):
        message = complaint_about(tmp_path, {"name": "a", "key_hashes": [digest] * (2 - len(others))}, *others)
        assert f"tenants: {digest} is given twice in key_hashes" in message
    floors = [{"name": name, "cache_min": 0.4} for name in "abc"]
    assert "tenants: cache_min adds up to 1.2" in complaint_about(tmp_path, *floors)
    load(tmp_path, {**MIXED, "tenants": [{"name": name, "cache_min": 0.1} for name in "abcdefghij"]})


def test_a_floor_is_below_its_ceiling(tmp_path: Path) -> None:
    message = complaint_about(tmp_path, {"name": "a", "cache_min": 0.5, "cache_max": 0.4})
    assert "tenants.0: cache_min (0.5) must be at most cache_max (0.4)" in message


def test_an_empty_public_prefix_is_named(tmp_path: Path) -> None:
    assert "cache.public_prefixes.0: " in complaint(tmp_path, {**MIXED, "cache": {"public_prefixes": [""]}})


# Loading


def test_overrides_are_merged_section_by_section(tmp_path: Path) -> None:
    content = {"workers": {"mixed": {"token_budget": 128}}, "http": {"port": 9000}}
    config = load(tmp_path, content, {"workers": {"mixed": {"max_requests": 32}}, "http": {"host": "::1"}})
    assert config.workers.mixed is not None
    assert (config.workers.mixed.token_budget, config.workers.mixed.max_requests) == (128, 32)
    assert (config.http.host, config.http.port) == ("::1", 9000)


def test_files_are_merged_before_the_overrides(tmp_path: Path) -> None:
    tenants_file = tmp_path / "tenants.yaml"
    tenants_file.write_text(
        f"tenants: [{{name: a, key_hashes: [{key_hash('k')}]}}]\ncache: {{pool_gib: 3, swap_gib: 1}}\n"
    )
    config = load_config("cpu_mixed", {"cache": {"pool_gib": 2}}, [tenants_file])
    assert [tenant.name for tenant in config.tenants] == ["a"]
    assert (config.cache.pool_gib, config.cache.swap_gib) == (2, 1)
    with pytest.raises(StartupError, match=r"config .*absent\.yaml: no such file"):
        load_config("cpu_mixed", files=[tmp_path / "absent.yaml"])


def test_an_override_can_take_a_section_away() -> None:
    config = load_config("cpu", {"workers": {"prefill": None, "decode": None, "mixed": {}}})
    assert config.workers.prefill is None and config.workers.mixed is not None


def test_an_override_is_checked_too() -> None:
    with pytest.raises(StartupError, match=r"unknown key 'http\.prt', did you mean 'port'"):
        load_config("cpu", {"http": {"prt": 1}})


def test_a_missing_file_lists_what_there_is() -> None:
    with pytest.raises(StartupError, match=r"nowhere: no such file; raydix comes with cpu, cpu_mixed, "):
        load_config("nowhere")


@pytest.mark.parametrize("content", ["workers: [", "just text", "- a\n- list\n", ""])
def test_what_is_no_mapping_is_refused(tmp_path: Path, content: str) -> None:
    complaint(tmp_path, content)


def test_a_section_that_is_no_mapping_is_named(tmp_path: Path) -> None:
    assert "http: " in complaint(tmp_path, {**MIXED, "http": 8000})


def test_a_configuration_cannot_be_changed() -> None:
    config = load_config("cpu")
    with pytest.raises(ValueError, match="frozen"):
        config.http.port = 1


@pytest.mark.parametrize("key", ["pool_gib", "segment_gib", "disk_gib", "transcript_mib", "await_timeout_s"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_sizes_and_times_are_finite(key: str, value: float) -> None:
    with pytest.raises(ValidationError, match=key):
        Config.model_validate({"cache": {key: value}, "workers": {"mixed": {}}})


def test_elastic_workers_stand_alone_and_hand_over(tmp_path: Path) -> None:
    config = load(tmp_path, {"workers": {"elastic": {"replicas": 3}}, "slo": {"ttft_ms": 2000, "tpot_ms": 50}})
    assert config.workers.hands_over and list(config.workers.sections) == ["elastic"]
    assert objectives(config.slo) == Objectives(ttft_s=2.0, tpot_s=0.05, when_late=WhenLate.WAIT)
    assert objectives(load(tmp_path, MIXED).slo) == Objectives(when_late=WhenLate.WAIT)
    assert not load(tmp_path, MIXED).workers.hands_over
    assert "configure prefill and decode, mixed, or elastic" in complaint(tmp_path, {"workers": {}})


@pytest.mark.parametrize(
    ("section", "numbers"),
    [
        ({}, (1, 1)),
        ({"replicas": 3}, (3, 3)),
        ({"max_replicas": 4}, (1, 4)),
        ({"min_replicas": 2, "max_replicas": 2}, (2, 2)),
        ({"min_replicas": 0, "max_replicas": 2}, (0, 2)),
        ({"min_replicas": 2, "max_replicas": 8, "replicas": 1}, (2, 8)),
    ],
)
def test_a_number_of_elastic_workers_is_fixed_or_follows_the_load(
    tmp_path: Path, section: dict[str, Any], numbers: tuple[int, int]
) -> None:
    config = load(tmp_path, {"workers": {"elastic": section}})
    assert config.workers.sections["elastic"].numbers == numbers
    assert config.stored_gib == config.cache.segment_gib + numbers[1] * config.cache.swap_gib
    assert Config.model_validate(config.model_dump()) == config


@pytest.mark.parametrize(
    ("section", "words"),
    [
        (
            {"min_replicas": -1, "max_replicas": 3},
            "workers.elastic.min_replicas: Input should be greater than or equal to 0",
        ),
        ({"min_replicas": 2}, "workers.elastic: min_replicas (2) needs max_replicas"),
        ({"replicas": 2, "max_replicas": 3}, "workers.elastic: replicas (2) is a fixed number, and max_replicas (3)"),
        ({"min_replicas": 4, "max_replicas": 3}, "workers.elastic: max_replicas (3) must be at least min_replicas (4)"),
    ],
)
def test_contradictory_numbers_are_refused(tmp_path: Path, section: dict[str, Any], words: str) -> None:
    assert words in complaint(tmp_path, {"workers": {"elastic": section}})


def test_no_workers_at_all_only_where_all_of_them_are_elastic(tmp_path: Path) -> None:
    section = {"min_replicas": 0, "max_replicas": 3}
    assert "needs all workers to be elastic" in complaint(tmp_path, {"workers": {"elastic": section, "mixed": {}}})


def test_the_number_of_other_workers_is_fixed(tmp_path: Path) -> None:
    refusal = complaint(tmp_path, {"workers": {"mixed": {"max_replicas": 3}}})
    assert "unknown key 'workers.mixed.max_replicas', did you mean 'replicas'?" in refusal
