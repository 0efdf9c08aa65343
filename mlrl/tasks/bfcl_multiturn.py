"""The calls of one step of a conversation, shared by N agents; their order counts, agent 0's calls come first.

Nothing is executed: calls are compared with the gold calls (`mlrl.tasks.tool_use.reward`, at most 1.20). One turn:
every step of a conversation is a row, and what was asked and called before it is in its prompt. Rows as for bfcl; on
the hub OpenMLRL/BFCL-V4-Parallel-Multi-Turn.

    accelerate launch train/magrpo.py --task bfcl_multiturn --task_args categories=base --agent_model MODEL
"""

from mlrl.tasks.tool_use.benchmark import MULTI_TURN, multi_turn_rows
from mlrl.tasks.tool_use.builder import tool_task_function
from mlrl.tasks.tool_use.samples import ORDERED_ROWS

task = tool_task_function(
    ORDERED_ROWS, multi_turn_rows, MULTI_TURN, default="base,miss_func,miss_param,long_context", ordered=True
)
