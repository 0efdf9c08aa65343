"""Several function calls for one request, shared by N agents; the order of the calls is of no account.

Nothing is executed: calls are compared with the gold calls (`mlrl.tasks.tool_use.reward`, at most 1.10). One turn.
Rows of the Berkeley Function-Calling Leaderboard come from the package `bfcl-eval` where it is installed (Apache 2.0;
`pip install bfcl-eval --no-deps` is enough), else from a file, the hub
(OpenMLRL/BFCL-V4-Parallel-Native), or a sample of our own.

    accelerate launch train/magrpo.py --task bfcl --task_args role_mode=odd_even --agent_model MODEL
"""

from mlrl.tasks.tool_use.benchmark import PARALLEL, parallel_rows
from mlrl.tasks.tool_use.builder import tool_task_function
from mlrl.tasks.tool_use.samples import PARALLEL_ROWS

task = tool_task_function(PARALLEL_ROWS, parallel_rows, PARALLEL, default="parallel,parallel_multiple", ordered=False)
