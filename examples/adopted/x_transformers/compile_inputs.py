"""What matrix/default.yaml compiles is called with this."""

import torch


def batch(B, S):
    """One batch of make, as keyword arguments of its forward."""
    return {
        "x": torch.randint(3, 100, (B, S)),
        # return_embeddings, return_logits_and_embeddings, return_intermediates,
        # return_embeddings_and_intermediates, return_logit_entropies, return_next_embed_pred, mask,
        # return_mems, return_attn, mems, mem_masks, detach_mems, recycle_steps, looped_steps,
        # max_looped_steps, looped_pred_all_logits, looped_inference, looped_exit_prob_threshold, pos,
        # prepend_embeds, prepend_mask, excise_prepend_embeds, embed_ids, sum_embeds, transform_token_embeds,
        # transform_block_inputs, return_attn_z_loss, attn_z_loss_weight, seq_start_pos, cache,
        # input_not_include_cache, token_emb_kwargs, to_logits_kwargs: left at the default, so not tried; add
        # what your callers give.
    }
# written by pytest-torchcompile, f80d314e7c6b: without this line, or edited, the file is yours
