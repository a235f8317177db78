"""Error certificates for KV-cache eviction by randomised design.

The stages of the method are functions, in this order:

    size   -> prob     design.inclusion_probs      known inclusion probabilities, certainty tokens included
    prob   -> keep     draw.poisson_keep           one coin per token, addressed by seed, document, layer, head, place
    keep   -> out      attention.retained_attention   softmax with the offset log(1/prob): the Hajek estimator
    weight -> var_hat  certificate.poisson_variance   the survey variance, from the retained tokens alone
    var_hat-> radius   certificate.radius             the certificate of one step and head

Symbols, here and in every module:

    prob        pi_i       inclusion probability of token i, 0 < pi_i <= 1 (1: a certainty token)
    keep        I_i        token i is retained
    logit       l_i        scale * q . k_i
    log_weight  log(1/pi_i)   the offset added to the logit of a retained token; -inf marks padding
    weight      w_i        softmax over retained tokens of l_i + log(1/pi_i)
    out         o_hat      sum of w_i v_i over retained tokens; o is the same over all tokens
    err         ||o_hat - o||
    var_hat     V_hat      sum over retained tokens of (1 - pi_i) w_i^2 ||v_i - o_hat||^2
    radius      r          the certificate: err <= r is what it claims, at level 1 - delta
    budget                 a fraction of the logical length in Policy, tokens in cert.design

Importing this package imports no torch; the modules do.
Source under study: arXiv 2607.21475. What that paper leaves open is marked (ours) where it is decided.
"""
