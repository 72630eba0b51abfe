import asyncio

import pytest

from rollout.scripted import SCRIPTED, ScriptedSampler
from rollout.types import FinishReason, Message, Role, SampleRequest, SamplingParams

REQUEST = SampleRequest(session=4, prompt_ids=(0,), params=SamplingParams(), seed=0)


def test_it_says_its_script_and_no_more(renderer):
    said = Message(role=Role.ASSISTANT, content="return x")
    sampler = ScriptedSampler(renderer, [said, ""])

    async def two():
        return await sampler.sample(REQUEST), await sampler.sample(REQUEST)

    first, second = asyncio.run(two())
    assert (first.ids, second.ids) == (renderer.answer_ids(said), tuple(renderer.stop_ids))
    assert first.logprobs_T.tolist() == [0.0] * len(first.ids)
    assert (first.finish, first.weight_version, len(first.routes_TLK)) == (FinishReason.STOP, SCRIPTED, 0)
    sampler.close_session(4)
    with pytest.raises(ValueError, match="script: no answer left, got a request in session 4; lower max_turns"):
        asyncio.run(sampler.sample(REQUEST))
