"""Distillation from a teacher's most probable tokens, which the cookbook has as a library only.

python soft_targets.py LOG_DIRECTORY TEACHER_PATH
"""

# pyright: reportMissingImports=false
# Runs in the cookbook's environment.

import asyncio
import sys

from tinker_cookbook.distillation import train_off_policy
from tinker_cookbook.distillation.datasets import TeacherConfig
from tinker_cookbook.recipes.chat_sl.chat_datasets import NoRobotsBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig

MODEL, RENDERER, BATCH_SIZE = "Qwen/Qwen3.5-9B-Base", "role_colon", 12


def config(log_path: str, teacher_path: str) -> train_off_policy.Config:
    conversations = NoRobotsBuilder(
        common_config=ChatDatasetBuilderCommonConfig(
            model_name_for_tokenizer=MODEL,
            renderer_name=RENDERER,
            max_length=256,
            batch_size=BATCH_SIZE,
        )
    )
    teachers = (
        TeacherConfig(base_model=MODEL, load_checkpoint_path=teacher_path),
        TeacherConfig(base_model=MODEL),
    )
    return train_off_policy.Config(
        learning_rate=3e-3,
        dataset_configs=[
            train_off_policy.DatasetWithTeacher(
                dataset_builder=conversations, teacher_config=teacher, weight=weight
            )
            for teacher, weight in zip(teachers, (3.0, 1.0), strict=True)
        ],
        model_name=MODEL,
        recipe_name="soft_targets",
        renderer_name=RENDERER,
        n_teacher_targets=5,
        batch_size=BATCH_SIZE,
        max_steps=8,
        log_path=log_path,
    )


asyncio.run(train_off_policy.main(config(*sys.argv[1:])))
