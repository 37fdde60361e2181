"""Larger models whose text part is a model of one of several families: `text_config` says of which. Only the text part
is read.

Prefixes are those of transformers 5 (`model.language_model.`) and of earlier releases (`language_model.model.`).
"""

from kvjax.models.family import Within

TEXT = {"model.language_model.": "model.", "language_model.model.": "model.", "language_model.lm_head.": "lm_head."}
OTHERS = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
FIELDS = frozenset(
    {
        *("vision_config", "image_token_index", "image_token_id", "projector_hidden_act", "multimodal_projector_bias"),
        *("vision_feature_layer", "vision_feature_select_strategy", "image_seq_length", "spatial_merge_size", "ignore_index"),
    }
)

GEMMA3 = Within(
    "Gemma3ForConditionalGeneration",
    "gemma3",
    TEXT,
    frozenset({"vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index", "image_token_id"}),
    unread=OTHERS,
)

MISTRAL3 = Within("Mistral3ForConditionalGeneration", "mistral3", TEXT, FIELDS, text="mistral", unread=OTHERS)
"""Mistral Small 3.1 and 3.2, with Pixtral's vision."""

LLAVA = Within("LlavaForConditionalGeneration", "llava", TEXT, FIELDS, text="llama", unread=OTHERS)
"""LLaVA 1.5 and models of its kind, with Pixtral's or another vision."""

IDEFICS3 = Within(
    "Idefics3ForConditionalGeneration",
    "idefics3",
    {"model.text_model.": "model."},
    frozenset({"vision_config", "image_token_id", "scale_factor"}),
    text="llama",
    unread=("model.vision_model.", "model.connector."),
)
SMOLVLM = Within("SmolVLMForConditionalGeneration", "smolvlm", IDEFICS3.prefixes, IDEFICS3.fields, "llama", IDEFICS3.unread)
