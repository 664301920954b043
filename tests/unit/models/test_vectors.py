"""What compiled functions are cached by."""

from areal_core.models import vectors


def test_the_kernel_cache_depends_on_the_intrinsics(monkeypatch):
    """They end up inside of functions of other files, whose own text is all that numba compares."""

    def twice(x):
        return 2 * x

    keys = []
    for source in ("one", "one", "another"):
        monkeypatch.setattr(vectors, "_SOURCE", source)
        function = vectors.compiled("int64(int64)")(twice)
        assert function(4) == 8
        keys.append(function._cache._index_key(function.signatures[0], function.targetctx.codegen()))
    assert keys[0] == keys[1] != keys[2]
