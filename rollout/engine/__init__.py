"""The inference engine, for rollouts and for use alone.

engine         requests in, generations out; one step after the other
scheduler      which tokens the next step computes
prefix_cache   pages that others can use again
kv_cache       the memory of the pages
runner         one step of the model on the pages
sampling       what chooses the next tokens
sampler        the engine as the `Sampler` of a batch of episodes
loading, mapped, text, stop_text   checkpoint folders, experts on disk, prompts and answers as text
"""
