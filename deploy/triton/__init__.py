"""A Triton Inference Server with one model of ours, `forebay_moe`: Mixtral and Qwen2-MoE with a heat-aware expert cache."""
