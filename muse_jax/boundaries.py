"""The boundaries of the block, in dataflow order: one name each for scopes, dump tensors, documents and errors."""

BOUNDARIES = (
    "x",  # [T, D] input of the block
    "router_logits",  # [T, E] f32, after the output multiplier
    "topk_ids",  # [T, K] i32, descending biased score
    "topk_weights",  # [T, K] f32, unbiased and renormalised
    "latent",  # [T, H] after pre_expert_proj
    "expert_input",  # [T, H] after pre_expert_norm
    "activation",  # [T, K, F] SwiGLU output of each route
    "expert_rows",  # [T, K, H] unweighted row of each route
    "normed_rows",  # [T, K, H] rows after post_expert_norm
    "combined",  # [T, H] weighted sum over the K routes
    "out",  # [T, D] after post_expert_proj
)
