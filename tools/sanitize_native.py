"""Run the kernel tests under sanitizers, and compile the kernels for Arm.

address, undefined   every law of the operators on the kernels, and of the decoder
thread               the laws about threads, on a build whose parallel loop is std::thread: the
                     thread sanitizer cannot see through the barriers of OpenMP
arm                  compiled and linked for AArch64 with warnings as errors; not run
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
# torch's own threads meet in an OpenMP runtime that the sanitizer does not see through, and glibc
# frees their memory. Races of ours are still told, also below autograd: a counter that all threads
# of a backward kernel raised was, and one of the decoder's.
NOT_OURS = "race:_dl_deallocate_tls\nrace:libtorch_cpu.so\n"
OPERATORS, DECODER = "tests/ops", "tests/models/test_decoder.py"


def main() -> int:
    """Run all three; stop at the first failure."""
    _compile_for_arm()
    address = _build("address", ANYMAMBA_SANITIZE="address,undefined")
    for choice in (["-k", "native", OPERATORS], [DECODER]):
        _test(address, "libasan.so", choice, ASAN_OPTIONS="detect_leaks=0")
    thread = _build("thread", ANYMAMBA_SANITIZE="thread", ANYMAMBA_STD_THREADS="ON")
    known = BUILD / "thread.supp"
    known.write_text(NOT_OURS)
    options = f"halt_on_error=1:suppressions={known}"
    for choice in (["-k", "native and threads", OPERATORS], ["-k", "threads", DECODER]):
        _test(thread, "libtsan.so", choice, TSAN_OPTIONS=options)
    print("sanitizers are silent, and the kernels compile for Arm")
    return 0


def _build(name: str, **options: str) -> Path:
    folder = BUILD / f"native-{name}"
    defines = [f"-D{key}={value}" for key, value in {"ANYMAMBA_STRICT": "ON", **options}.items()]
    _run(["cmake", "-S", str(ROOT / "native"), "-B", str(folder), "-G", "Ninja", *defines])
    _run(["cmake", "--build", str(folder)])
    return folder / "_native.so"


def _compile_for_arm() -> None:
    # Zig carries a Clang and the headers of every target inside one package of the registry.
    spec = importlib.util.find_spec("ziglang")
    if spec is None or spec.origin is None:
        sys.exit("tools/sanitize_native.py needs ziglang: pip install 'anymamba[native]'")
    zig = Path(spec.origin).parent / "zig"
    library = _build(
        "arm",
        CMAKE_CXX_COMPILER=f"{zig};c++",
        CMAKE_CXX_COMPILER_TARGET="aarch64-linux-gnu",
        CMAKE_SYSTEM_NAME="Linux",
        CMAKE_SYSTEM_PROCESSOR="aarch64",
        ANYMAMBA_STD_THREADS="ON",
    )
    machine = library.read_bytes()[18:20]
    if machine != b"\xb7\x00":
        sys.exit(f"{library} is not for AArch64: machine {machine!r}")


def _test(library: Path, sanitizer: str, choice: list[str], **options: str) -> None:
    # The sanitizer looks for the C++ runtime's `throw` when it starts: Python alone has none.
    libraries = [_library(name) for name in (sanitizer, "libstdc++.so")]
    environment = {
        **os.environ,
        **options,
        "ANYMAMBA_NATIVE_LIBRARY": str(library),
        "LD_PRELOAD": ":".join(libraries),
    }
    # Only this process runs: a child that compiles or forks would run under the sanitizer too.
    command = [sys.executable, "-W", "ignore:Failed to initialize NumPy", "-m", "pytest", "-q"]
    _run([*command, "-p", "no:cacheprovider", "-m", "not slow", *choice], environment)


def _library(name: str) -> str:
    command = ["c++", f"-print-file-name={name}"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return str(Path(found).resolve())


def _run(command: list[str], environment: dict[str, str] | None = None) -> None:
    print("+", " ".join(command), flush=True)
    subprocess.run(command, check=True, cwd=ROOT, env=environment)


if __name__ == "__main__":
    sys.exit(main())
