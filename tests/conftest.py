"""How hypothesis runs here: the same examples each time, and no deadline, which a busy machine would miss.

``pytest --hypothesis-profile=explore`` tries examples that no run has tried before.
"""

from hypothesis import settings

settings.register_profile("kernelcast", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=300)
settings.load_profile("kernelcast")
