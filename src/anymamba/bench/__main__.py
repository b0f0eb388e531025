"""`python -m anymamba.bench`: print the figures of the scans, with their budgets."""

import platform
import sys

import torch

from anymamba.bench.scans import Figure, core_figures, core_inputs, scan_figures, scan_growth


def main() -> None:
    """Measure and print; takes about two minutes."""
    write = sys.stdout.write
    write(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}, "
        "float32, forward + backward, interleaved medians\n\n"
    )
    for groups in (24, 1):
        figures = core_figures(core_inputs(g=groups))
        write(f"SSD core, b1 s4096 h24 p64 r128, {groups} group{'s' if groups > 1 else ''}\n")
        _print(figures)
        serial, recalculated = figures[1], figures[2]
        _budget("time, recalculated / serial", recalculated.seconds / serial.seconds, 1.3)
        _budget("intermediates / inputs", recalculated.intermediates / recalculated.inputs, 0.5)
        _budget(
            "intermediates / those of serial",
            recalculated.intermediates / serial.intermediates,
            0.35,
        )
    figures = scan_figures()
    write("Selective scan, b1 s2048 d1536 r16\n")
    _print(figures)
    loop, scan = figures
    _budget("time, scan / loop over unbind", scan.seconds / loop.seconds, 1 / 1.3)
    _budget("intermediates / those of the loop", scan.intermediates / loop.intermediates, 0.25)
    growth = scan_growth([1024, 2048, 4096, 8192])
    write("Selective scan, microseconds per token by length: ")
    write(", ".join(f"{s}: {1e6 * value:.0f}" for s, value in growth.items()) + "\n")
    _budget("per token at 8192 / at 1024", growth[8192] / growth[1024], 1.2)


def _print(figures: list[Figure]) -> None:
    for name, seconds, intermediates, inputs in figures:
        sys.stdout.write(
            f"  {name:22} {1e3 * seconds:8.1f} ms  {intermediates / 1e6:8.1f} MB intermediates  "
            f"({intermediates / inputs:.2f}x inputs)\n"
        )


def _budget(what: str, value: float, limit: float) -> None:
    verdict = "ok" if value <= limit else "MISSED"
    sys.stdout.write(f"    {what:36} {value:6.3f}   budget <= {limit:.2f}   {verdict}\n")


if __name__ == "__main__":
    main()
