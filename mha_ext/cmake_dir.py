"""Where CMake finds the C++ side of mha_ext."""

from __future__ import annotations

from pathlib import Path

CMAKE_DIR = Path(__file__).resolve().with_name("cmake")


def main(argv: list[str]) -> int:
    """`python -m mha_ext cmake-dir`: prints the folder of mha_extConfig.cmake."""
    from .cli import CommandError, Parser, fail

    parser = Parser(
        prog="mha-ext cmake-dir",
        description="Prints the folder from which find_package(mha_ext) takes the C++ library and its headers.",
        epilog='use: cmake -Dmha_ext_DIR="$(python -m mha_ext cmake-dir)" ...',
    )
    try:
        parser.parse_args(argv)
    except CommandError as error:
        return fail(parser.prog, error)
    print(CMAKE_DIR)
    return 0
