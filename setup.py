"""Builds and installs flash_attn. Knobs: docs/build.md. The work is done by the modules in tools/."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution

ROOT = Path(__file__).resolve().parent
SOURCE_DIR = ROOT / "csrc" / "flash_attn"
sys.path.insert(0, str(ROOT / "tools"))

from binding_build import MODULE, build_binding
from build_folder import alone_in, build_folder, is_writable, scratch_folder
from build_log import announce, duration, log_to, say, show
from errors import BuildError
from install_plan import Plan, make_plan
from kernel_build import build_from_environment, default_archs
from kernel_manifest import parse_archs
from machine import commit_of
from portable_wheel import build_tag, make_portable
from toolchain import cuda_header_dirs

# dist_info builds nothing, but pip runs it before it downloads dependencies: a missing torch is best reported then.
BUILD_COMMANDS = {"bdist_wheel", "editable_wheel", "build", "build_ext", "install", "develop", "dist_info"}
EDITABLE_COMMANDS = {"editable_wheel", "develop"}


class PlannedDistribution(Distribution):
    """A distribution that has an extension module only if the plan says so: a CPU-only wheel is a pure one."""

    plan: Plan | None = None
    built = ""  # what was, and its size

    def has_ext_modules(self) -> bool:
        return self.plan is not None and self.plan.torch is not None


class BuildPython(build_py):
    """Copies the package and writes the build's identity.

    Without kernels the module's place is taken by one that says so.
    """

    def run(self) -> None:
        editable = getattr(self, "editable_mode", False)
        super().run()
        plan = self.distribution.plan
        folder = ROOT / "flash_attn" if editable else Path(self.build_lib, "flash_attn")
        folder.mkdir(parents=True, exist_ok=True)
        identity = {
            "commit": commit_of(ROOT),
            "torch": plan.torch.version if plan.torch else None,
            "backends": ["cuda", "cpu"] if plan.torch else ["cpu"],
        }
        (folder / "_build_info.json").write_text(json.dumps(identity, indent=1) + "\n", encoding="utf-8")
        stand_in = folder.parent / f"{MODULE}.py"
        if plan.torch is None:
            shutil.copyfile(ROOT / "tools" / "cpu_only_module.py", stand_in)
        else:  # of an earlier build: it would be found before the extension
            stand_in.unlink(missing_ok=True)


class BuildBinding(build_ext):
    """Builds the kernel archive, unless one is given, and the module."""

    def build_extension(self, extension: Extension) -> None:
        target = Path(self.get_ext_fullpath(extension.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with alone_in(build_folder()):  # until the module is copied: another install may ask for other kernels
                module = build_folder() / "binding" / target.name
                info = json.loads(build_module(self.distribution.plan, module))
                shutil.copy2(module, target)
        except BuildError as error:
            show("")
            sys.exit(f"error: {error}")
        self.distribution.built = (
            f"{MODULE} for torch {info['torch']} and sm {';'.join(info['archs'])}, {target.stat().st_size / 1e6:.1f} MB"
        )


def build_module(plan: Plan, module: Path) -> str:
    """Builds the kernel archive, unless one is given, and `module`. Returns its build info."""
    site_dirs = [*sys.path, *plan.torch.site_dirs]
    if plan.archive is not None:
        archive = plan.archive
        say(f"kernels: {archive} (FLASH_ATTN_KERNEL_ARCHIVE)")
    else:
        knob = os.environ.get("FLASH_ATTN_CUDA_ARCHS")
        archs = parse_archs(knob) if knob else default_archs()
        archive = build_from_environment(site_dirs, plan.toolkit, archs)
    major = plan.torch.cuda.split(".")[0]
    fits = (
        plan.toolkit is not None and plan.toolkit.major == major
    )  # with a given archive the nvcc found may be of another major
    headers = [plan.toolkit.include] if fits else cuda_header_dirs(site_dirs, major)
    return build_binding(plan.torch, SOURCE_DIR, archive, headers, commit_of(ROOT), module)


def wheel_command() -> type:
    """bdist_wheel, of setuptools or of the package wheel, whichever is installed, with a portable result."""

    class BuildWheel(Distribution().get_command_class("bdist_wheel")):
        """Names the wheel after its torch, and tags it manylinux if auditwheel agrees."""

        def finalize_options(self) -> None:
            torch = self.distribution.plan.torch
            if torch is not None and not self.build_number:
                self.build_number = build_tag(torch.version, torch.cuda)
            super().finalize_options()

        def run(self) -> None:
            super().run()
            torch = self.distribution.plan.torch
            if torch is None:
                return
            command, version, wheel = self.distribution.dist_files.pop()
            portable = make_portable(Path(wheel), [sys.executable, torch.executable])
            self.distribution.dist_files.append((command, version, str(portable)))

    return BuildWheel


def own_folders(commands: set[str]) -> dict:
    """Options that keep an install's files out of the checkout, where an install at the same time would change and
    delete them. Not those of commands whose result belongs there: build, develop, sdist."""
    scratch = str(scratch_folder())
    options = {}
    if not commands & {"build", "build_ext", "develop"}:
        options["build"] = {"build_base": scratch}
    if not commands & {"develop", "sdist"}:
        options["egg_info"] = {"egg_base": scratch}
    return options


def make_checked_plan(building: set[str]) -> Plan:
    """make_plan(), after what no plan can mend."""
    if building & EDITABLE_COMMANDS and not is_writable():
        raise BuildError(
            f"editable install: expected a checkout that this user can write, got {ROOT}; pip install . copies it"
        )
    if not is_writable():
        say(f"{ROOT} is read-only: building in {build_folder()}, which is removed afterwards")
    return make_plan(ROOT, SOURCE_DIR)


def main() -> None:
    start = time.monotonic()
    building = BUILD_COMMANDS.intersection(sys.argv[1:])
    if building:
        log_to(build_folder() / "build.log")
        try:
            PlannedDistribution.plan = make_checked_plan(building)
        except BuildError as error:
            sys.exit(f"error: {error}")
        plan = PlannedDistribution.plan
        if plan.torch is None:
            tell = say if building == {"dist_info"} else announce  # pip runs both
            tell(f"NOTICE: installing flash_attn with its CPU backend only: {plan.cpu_only_reason}.")
            say("        CUDA tensors will be refused. What a GPU install needs: docs/build.md.")
        else:
            say(f"flash_attn for torch {plan.torch.version} (CUDA {plan.torch.cuda})")
    commands = {"build_py": BuildPython, "build_ext": BuildBinding}
    if "bdist_wheel" in building:
        commands["bdist_wheel"] = wheel_command()
    distribution = setup(
        license="BSD-3-Clause",
        distclass=PlannedDistribution,
        ext_modules=[Extension(MODULE, sources=["csrc/flash_attn/flash_api.cpp"])],
        cmdclass=commands,
        options=own_folders(set(sys.argv[1:])),
    )
    if distribution.built:
        announce(f"built {distribution.built}, in {duration(time.monotonic() - start)}")


main()
