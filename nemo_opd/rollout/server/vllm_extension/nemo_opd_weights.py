"""Runs inside vLLM's workers, in vLLM's own environment: found by PYTHONPATH, it imports nothing of this package."""

from typing import Any


class WholeReload:
    """A method that vLLM adds to its workers (`--worker-extension-cls`)."""

    def reload_whole(self: Any, folder: str) -> None:
        """vLLM's own reload, and then the head where it shares the embeddings' weights.

        On CPUs vLLM keeps the head in a packed form, which it renews from the folder's own tensor alone; a model with
        shared weights has none, and would go on with the old head.
        """
        self.reload_weights(weights_path=folder)
        if not getattr(self.vllm_config.model_config.hf_text_config, "tie_word_embeddings", False):
            return
        modules = list(self.model_runner.get_model().modules())
        heads = [each for each in modules if type(each).__name__ == "ParallelLMHead"]
        embeddings = [each for each in modules if type(each).__name__ == "VocabParallelEmbedding"]
        for head in heads:
            head.weight = embeddings[0].weight
            head.quant_method.process_weights_after_loading(head)
