"""One evaluation episode as an animation: what a value agent does when it no longer explores."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ensemblepp.envs.gym_value import GymValue
from ensemblepp.errors import ParameterError, check_int, check_real
from ensemblepp.files import atomic_file
from ensemblepp.value_types import ValueAgent, ValueEnvironment

EPISODE_FILE = "episode.gif"
"""Name of the animation in a run folder."""

_OWNER = "record_episode"
_LARGEST_DELAY = 10_000  # milliseconds


def record_episode(
    agent: ValueAgent,
    environment: ValueEnvironment,
    path: str | os.PathLike[str],
    *,
    replica: int = 0,
    seed: int = 0,
    frame_rate: float = 30.0,
) -> float:
    """Play one evaluation episode of one replica, write its frames as an animated GIF, and return the episode's return.

    Args:
        agent: Acts greedily under one fresh index; its stream of evaluation indices moves, nothing else does.
        environment: The agent's own; its copies play, itself it stays as it is.
        path: File to write; it ends in .gif.
        replica: Which learner plays.
        seed: All that is random in the environment follows from it.
        frame_rate: Frames per second; a frame is one environment step.

    Raises:
        ParameterError: An environment that cannot draw itself, or a value that breaks a rule, by name.
        ImportError: Pillow is missing, or what the environment draws with.
    """
    problem = check_recordable(environment, path)
    check_real("frame_rate", _OWNER, frame_rate, above=1000 / _LARGEST_DELAY)
    if check_int("replica", _OWNER, replica, minimum=0) >= agent.num_replicas:
        raise ParameterError("replica", _OWNER, f"be below the agent's {agent.num_replicas}", replica)
    rendering = problem.make_rendering()
    try:
        observation, index = rendering.reset(seed), agent.draw_evaluation_index(1)
        frames, total, playing = [rendering.render(replica)], 0.0, True
        while playing:
            step = rendering.step(agent.act_evaluation(observation.unsqueeze(1), index).squeeze(1))
            total += float(step.reward[replica])
            playing = not bool(step.terminated[replica] | step.truncated[replica])
            if playing:  # at an end the environment has begun its next episode already
                frames.append(rendering.render(replica))
            observation = step.observation
    finally:
        rendering.close()
    images = [_images().fromarray(frame) for frame in frames]
    with atomic_file(Path(path)) as file:
        images[0].save(
            file, format="GIF", save_all=True, append_images=images[1:], duration=round(1000 / frame_rate), loop=0
        )
    return total


def check_recordable(environment: ValueEnvironment, path: str | os.PathLike[str]) -> GymValue:
    """Return the environment if `record_episode` can show it and write that file.

    Raises:
        ParameterError: The environment cannot draw itself as pixels, or the path does not end in .gif.
        ImportError: Pillow is missing.
    """
    if not isinstance(environment, GymValue):
        raise ParameterError("environment", _OWNER, "be a GymValue, which can draw itself", type(environment).__name__)
    environment.check_rendering()
    if Path(path).suffix.lower() != ".gif":
        raise ParameterError("path", _OWNER, "end in .gif", repr(str(path)))
    _images()
    return environment


def _images() -> Any:
    try:
        from PIL import Image  # needs the extra [video]
    except ImportError as error:
        raise ImportError("Pillow is missing; install it with: pip install 'ensemblepp[video]'") from error
    return Image
