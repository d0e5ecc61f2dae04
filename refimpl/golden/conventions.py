"""What a stack can do in more than one way, and which way the golden values are made: the first rung of every comparison."""
from refimpl.golden.recipe import Recipe

WEIGHT_LAYOUT = "y = x @ w + b, w is stored (d_in, d_out); torch's nn.Linear keeps the transpose"


def conventions(recipe: Recipe) -> dict[str, str]:
    """For this model, in words."""
    c = recipe.config
    gelu = {"gelu_tanh": "0.5·x·(1 + tanh(√(2/π)·(x + 0.044715·x³)))", "gelu_erf": "0.5·x·(1 + erf(x/√2))"}
    rope = {"half": "channel i turns with channel i + head_dim/2 (GPT-NeoX, Hugging Face)",
            "interleaved": "channel 2i turns with channel 2i + 1 (RoFormer, Meta's LLaMA)"}
    eps = {"layer_norm": "(x - mean)/√(var + eps)·g + b, var is the mean of (x - mean)²",
           "rms_norm": "x/√(mean(x²) + eps)·g", "rms_norm_1+w": "x/√(mean(x²) + eps)·(1 + w)"}
    activation = {"relu": "max(x, 0)", "swiglu": "silu(gate)·up", "geglu_tanh": "GELU of tanh form(gate)·up",
                  "geglu_erf": "GELU of erf form(gate)·up"} | gelu
    out = {"weight_layout": WEIGHT_LAYOUT, "norm": f"{eps[c.norm]}, eps {c.eps:g}",
           "norm_place": {"pre": "before each sublayer, and before the head", "post": "after each residual sum"}[c.norm_place],
           "activation": activation[c.ffn],
           "attention": f"softmax(q·k/√{c.head_dim}), scores and softmax in the precision of the run"}
    out["mask"] = "causal: query i sees keys j ≤ i"
    if c.windows:
        out["window"] = f"W keys, the own one included: i - j < W; W of the layers in turn: {list(c.windows)} (0: all)"
    if c.n_kv_heads != c.n_heads:
        out["gqa"] = f"query head h uses kv head h // {c.n_heads // c.n_kv_heads}"
    if c.positions == "rope":
        out["rope"] = f"{rope[c.rope_pairing]}, theta {c.rope_theta:g}, positions from 0"
    if c.embed_scale != 1:
        out["embed_scale"] = f"the embedding times {c.embed_scale:g}"
    if c.soft_cap:
        out["soft_cap"] = f"logits = {c.soft_cap:g}·tanh(logits/{c.soft_cap:g})"
    out["head"] = "its matrix is the embedding's, transposed" if c.tied else "a matrix of its own"
    out["loss"] = "mean over the valid targets of all ranks: one division by their number; target -100 is ignored"
    out["dact"] = "gradient of that mean loss by what an op gave, all its uses together"
    out["grad"] = "gradient of that mean loss, summed over ranks, before clipping"
    out["clip"] = f"all gradients times {recipe.clip:g}/norm where the norm of all together exceeds {recipe.clip:g}"
    out["optimizer"] = (f"AdamW, lr {recipe.lr:g}, betas {recipe.beta1:g} and {recipe.beta2:g}, eps {recipe.eps:g} outside the "
                        f"root, bias correction, decoupled weight decay {recipe.weight_decay:g} of matrices and embeddings")
    return out
