"""Plans for other programs: a file of ordinary PyTorch, flags of torchtitan and Megatron-LM."""

from flexsearch.report.export.flags import Flags, megatron_flags, torchtitan_flags
from flexsearch.report.export.script import summing_note, torch_file

__all__ = ["Flags", "megatron_flags", "summing_note", "torch_file", "torchtitan_flags"]
