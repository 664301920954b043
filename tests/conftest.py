"""What all tests share: property tests try the same examples at every run, HYPOTHESIS_PROFILE=explore tries others."""

import os

from hypothesis import settings

settings.register_profile("fixed", derandomize=True)
settings.register_profile("explore", derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))
