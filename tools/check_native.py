"""Fail where a compiler is there but the kernels are not: a broken build must not pass as no build.

The package installs without its kernels when they cannot be compiled. That is right for a user and
wrong for a contributor, who would otherwise test the portable code twice.
"""

import shutil
import sys

from anymamba.ops import native_status

COMPILERS = ("c++", "g++", "clang++")


def main() -> int:
    """Report what the kernels are; exit code 1 if they should have been built and were not."""
    status = native_status()
    if status.why_not is None:
        print(f"kernels: {status.variant} (of {', '.join(status.available)}), {status.threading}")
        return 0
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        print(f"kernels: none, and no C++ compiler to build them ({status.why_not})")
        return 0
    print(f"kernels: none although there is {compiler}: {status.why_not}.")
    print("See what the build says: pip install -v -C cmake.define.ANYMAMBA_STRICT=ON .")
    return 1


if __name__ == "__main__":
    sys.exit(main())
