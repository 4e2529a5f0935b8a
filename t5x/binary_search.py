"""T5X's `binary_search`: top-k and top-p masks by binary search over float32."""

from rosetta_t5.decoding.next_token import float32_bsearch, int32_bsearch, topk_mask, topp_mask
