"""Put the folders of the top level that the package reads into the wheel; see flows.places."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

FILES = ("conf", "infra/terraform", "requirements", "prefect.yaml")


class Build(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib, "flows", "files")
        shutil.rmtree(target, ignore_errors=True)
        for name in FILES:
            for file in [Path(name), *Path(name).rglob("*")]:
                if file.is_file() and ".terraform" not in file.parts:
                    (target / file).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(file, target / file)


setup(cmdclass={"build_py": Build})
