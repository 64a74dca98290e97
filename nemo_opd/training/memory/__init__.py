"""An estimate of each rank's memory from the models' configurations, and what is offloaded because of it."""

from nemo_opd.training.memory.estimate import estimate, settle_memory
from nemo_opd.training.memory.optimizer import state_bytes
from nemo_opd.training.memory.parts import Advice, Memory, MemoryEstimate, Part, Phase
from nemo_opd.training.memory.sampling import samples_in_workers, student_limit
from nemo_opd.training.memory.server import server_share
from nemo_opd.training.memory.situation import Machine, ModelSetup, Situation, teachers_ahead
from nemo_opd.training.memory.size import ModelSize, model_size, size_of
from nemo_opd.training.memory.teacher import answer_limit, output_columns, teachers_answer

__all__ = [
    "Advice",
    "Machine",
    "Memory",
    "MemoryEstimate",
    "ModelSetup",
    "ModelSize",
    "Part",
    "Phase",
    "Situation",
    "answer_limit",
    "estimate",
    "model_size",
    "output_columns",
    "samples_in_workers",
    "server_share",
    "settle_memory",
    "size_of",
    "state_bytes",
    "student_limit",
    "teachers_ahead",
    "teachers_answer",
]
