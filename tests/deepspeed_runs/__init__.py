"""Real checkpoints of unmodified DeepSpeed with their ground truth, for any test.

Use::

    from tests.deepspeed_runs import CASES, copy_run, deepspeed_run

    run = deepspeed_run("s2-bf16-dp2")      # trains it once, then comes from the cache
    run.path                                # save_dir: has `latest` and `global_step3/`
    run.tag_path                            # the checkpoint folder itself
    run.facts["parameters"][fqn]            # {"group": 0, "states": ["exp_avg", ...], "step": 3.0}
    run.facts["groups"][0]                  # {"hyper": {"lr": ..., ...}, "names": [fqn, ...]}
    run.facts["aliases"], run.facts["counters"], run.facts["scheduler"], run.facts["client_state"]
    run.tensor("fp32", fqn)                 # numpy, bit-exact; also "exp_avg", "exp_avg_sq",
    run.tensor("weight", fqn)               # ... the optimizer's own state names; 16-bit weights
    run.tensor("buffer", name)              # ... are ml_dtypes.bfloat16
    run.tensors()                           # all of them, keyed "STATE:FQN"
    copied = copy_run(run, tmp_path)        # a private copy for tests that change files

`truth.py` says where each value comes from. For ``tp > 1`` the tensors are those of one TP rank
(`tp_rank=`); `run.full(state, fqn)` joins them by the plain rule recorded in ``facts["tp_dims"]``.
Pipelines (`PIPELINE_CASES`) have one truth per stage: `stage=`, and ``facts["stages"]``.

`resume.py` goes on with a run in unmodified DeepSpeed, in any layout, and `compare.py` tells what of it is not
as in the original engine; `MATRIX_CASES` are the sources of ``tests/test_matrix.py``.

The cache is ``tests/.cache/deepspeed/CASE-HASH``: the hash covers the case, this package's
scripts and the frameworks' versions. `UCPSTORE_TEST_CACHE` names another folder. A case takes
about a second; the first one of a session pays the imports of torch and DeepSpeed. Safe under
pytest-xdist.
"""

from __future__ import annotations

from tests.deepspeed_runs.cache import Run, copy_run, deepspeed_run
from tests.deepspeed_runs.cases import CASES, MATRIX_CASES, PIPELINE_CASES, Case

__all__ = ["CASES", "MATRIX_CASES", "PIPELINE_CASES", "Case", "Run", "copy_run", "deepspeed_run"]
