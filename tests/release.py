"""What a release needs: `python -m tests.release v1.2.3` fails where the tag, the package, the chart and the changelog
do not name the same version, or where a base image has no digest."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> None:
    if wrong := faults(sys.argv[1], ROOT):
        sys.exit("\n".join(f"error: {each}" for each in wrong))


def faults(tag: str, root: Path) -> list[str]:
    """What stands in the way of a release with this tag, one sentence each."""
    version = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    chart = (root / "k8s/chart/Chart.yaml").read_text()
    named = dict(re.findall(r"^(version|appVersion): (\S+)$", chart, re.MULTILINE))
    found = []
    if tag != f"v{version}":
        found.append(f"the tag is {tag}, pyproject.toml has version {version}: the tag must be v{version}")
    found += [
        f"k8s/chart/Chart.yaml: {key} is {value}, not {version}" for key, value in named.items() if value != version
    ]
    if not re.search(rf"^## \[?{re.escape(version)}\b", (root / "CHANGELOG.md").read_text(), re.MULTILINE):
        found.append(f"CHANGELOG.md has no heading '## {version}'")
    command = [sys.executable, str(root / "k8s/lock/images.py"), "--check", "--folder", str(root / "k8s")]
    images = subprocess.run(command, capture_output=True, text=True)
    if images.returncode:
        found.append(images.stderr.strip().removeprefix("error: "))
    return found


if __name__ == "__main__":
    main()
