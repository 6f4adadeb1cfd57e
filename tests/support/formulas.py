"""The published formulas in NumPy float64, written out row by row and token by token: what the fast code must equal.

B = P·G rows (prompt-major), T tokens; `mask` [B, T] bool, True = counts; `log_ratio` = logπ − logπ_old [B, T];
`advantages` [B, T]; `rewards` [P, G]. Nothing is clamped for safety: keep log-ratios below 20.
"""

import math

import numpy as np


def _each(function, log_ratio, advantages):
    """function(log-ratio, advantage, row, token) at every position."""
    out = np.zeros(log_ratio.shape)
    for i, t in np.ndindex(*log_ratio.shape):
        out[i, t] = function(float(log_ratio[i, t]), float(advantages[i, t]), i, t)
    return out


def _clip(value, low, high):
    return min(max(value, low), high)


def _ppo(ratio, advantage, low, high):
    """min(rA, clip(r, 1 − ε_low, 1 + ε_high)A): PPO, arXiv 1707.06347, Eq. 7."""
    return min(ratio * advantage, _clip(ratio, 1 - low, 1 + high) * advantage)


def _masked_mean(values, row_mask):
    kept = [float(v) for v, m in zip(values, row_mask) if m]
    return sum(kept) / len(kept) if kept else 0.0


# Surrogates: log_ratio, advantages, mask -> objective [B, T], maximised


def clipped(log_ratio, advantages, mask, *, epsilon_low, epsilon_high, dual_clip=None, delta=None):
    """PPO (1707.06347, Eq. 7), asymmetric as in DAPO (2503.14476, Eq. 8).

    `dual_clip` c > 1: max(that, cA) where A < 0 (1912.09729). `delta`: min(r, δ) in the first term (INTELLECT-2,
    2505.07291, two-sided clipping).
    """

    def one(x, a, i, t):
        r = math.exp(x)
        first = r if delta is None else min(r, delta)
        value = min(first * a, _clip(r, 1 - epsilon_low, 1 + epsilon_high) * a)
        return max(value, dual_clip * a) if dual_clip is not None and a < 0 else value

    return _each(one, log_ratio, advantages)


def gspo(log_ratio, advantages, mask, *, epsilon_low, epsilon_high):
    """GSPO, 2507.18071, Eq. 5 with s of Eq. 7; the row's value on each of its tokens."""
    s = [math.exp(_masked_mean(x, m)) for x, m in zip(log_ratio, mask)]
    return _each(lambda x, a, i, t: _ppo(s[i], a, epsilon_low, epsilon_high), log_ratio, advantages)


def gspo_gradient(log_ratio, advantages, mask, *, epsilon_low, epsilon_high):
    """d objective / d logπ of a token in GSPO-token, 2507.18071, s_t = sg(s)·π_t/sg(π_t): sA, 0 where clipped.

    Summed with any weights that are equal within a row it is the gradient of `gspo`, if A is equal within the row.
    """
    s = [math.exp(_masked_mean(x, m)) for x, m in zip(log_ratio, mask)]

    def one(x, a, i, t):
        cut = s[i] > 1 + epsilon_high if a > 0 else s[i] < 1 - epsilon_low
        return 0.0 if cut else s[i] * a

    return _each(one, log_ratio, advantages)


def response_clipped(log_ratio, advantages, mask, *, epsilon_low, epsilon_high):
    """PPO, 1707.06347, Eq. 7, with a response as one action, R = Π_t r_t; the row's value on each of its tokens."""
    products = [math.prod(math.exp(x) for x, m in zip(*row) if m) for row in zip(log_ratio, mask)]
    return _each(lambda x, a, i, t: _ppo(products[i], a, epsilon_low, epsilon_high), log_ratio, advantages)


def cispo(log_ratio, advantages, mask, *, ratio_max):
    """CISPO, MiniMax-M1, 2506.13585, Eq. 4 and 5 without a lower bound: min(r, ratio_max)·A·log r.

    The paper has logπ, which differs by a constant. min(r, ratio_max) is held fixed: for the gradient see
    `cispo_gradient`, not the differences of this value.
    """
    return _each(lambda x, a, i, t: min(math.exp(x), ratio_max) * a * x, log_ratio, advantages)


def cispo_gradient(log_ratio, advantages, mask, *, ratio_max):
    """d objective / d logπ of CISPO, 2506.13585, Eq. 4: sg(min(r, ratio_max))·A, never zero by clipping."""
    return _each(lambda x, a, i, t: min(math.exp(x), ratio_max) * a, log_ratio, advantages)


def sapo(log_ratio, advantages, mask, *, tau_positive, tau_negative):
    """SAPO, 2511.20347, the gate f(r) = σ(τ(r − 1))·4/τ times A; τ is the positive one where A > 0 only."""

    def one(x, a, i, t):
        tau = tau_positive if a > 0 else tau_negative
        return a * 4 / tau / (1 + math.exp(-tau * (math.exp(x) - 1)))

    return _each(one, log_ratio, advantages)


def gmpo(log_ratio, advantages, mask, *, epsilon_low, epsilon_high):
    """GMPO, 2507.20673, clipped objective: geometric mean of the clipped ratios times A, on each of the row's tokens.

    In log space as in callsys/GMPO: min(x, clip(x)) where A > 0 and max(x, clip(x)) where A < 0.
    """

    def log_clipped(x, a, i, t):
        bounded = _clip(x, -epsilon_low, epsilon_high)
        return min(x, bounded) if a >= 0 else max(x, bounded)

    logs = _each(log_clipped, log_ratio, advantages)
    mean = [math.exp(_masked_mean(x, m)) for x, m in zip(logs, mask)]
    return _each(lambda x, a, i, t: mean[i] * a, log_ratio, advantages)


def reinforce(log_ratio, advantages, mask):
    """REINFORCE, Williams 1992 (in RLOO, 2402.14740): A·log r, whose gradient is that of A·logπ."""
    return _each(lambda x, a, i, t: a * x, log_ratio, advantages)


def _stats(values, correction):
    """Mean and standard deviation (divisor n − correction) of the values; std 0 if they are equal or one alone."""
    values = [float(v) for v in values if not math.isnan(v)]
    if not values:
        return 0.0, 0.0
    if max(values) == min(values):
        return values[0], 0.0
    mean = math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - correction))


# The papers' objectives, each from its displayed equation: a scalar, maximised. E over prompts is the mean over P


def _groups(rewards, mask):
    """For every prompt: its rewards, and for every completion the row and the tokens that count."""
    num_prompts, size = rewards.shape
    for p in range(num_prompts):
        rows = range(p * size, (p + 1) * size)
        yield [float(r) for r in rewards[p]], [(i, [t for t in range(mask.shape[1]) if mask[i, t]]) for i in rows]


def _z(group, eps, correction):
    """Â_i = (R_i − mean)/(std + eps), all 0 if the rewards are equal."""
    mean, std = _stats(group, correction)
    return [(r - mean) / (std + eps) if std else 0.0 for r in group]


def paper_grpo(logprobs, old_logprobs, ref_logprobs, rewards, mask, *, epsilon, kl_coef, eps, correction):
    """DeepSeekMath, 2402.03300, Eq. 3, the KL inside the token sum as Eq. 4 (k3 without ratio)."""
    total = 0.0
    for group, rows in _groups(rewards, mask):
        for a, (i, tokens) in zip(_z(group, eps, correction), rows):
            for t in tokens:
                r = math.exp(logprobs[i, t] - old_logprobs[i, t])
                q = math.exp(ref_logprobs[i, t] - logprobs[i, t])
                total += (_ppo(r, a, epsilon, epsilon) - kl_coef * (q - math.log(q) - 1)) / len(tokens) / len(group)
    return total / len(rewards)


def paper_dr_grpo(logprobs, old_logprobs, ref_logprobs, rewards, mask, *, epsilon, length=1):
    """Dr. GRPO, 2503.20783: neither 1/|o| nor std. `length` 1 is the displayed equation, L the paper's Listing 1."""
    total = 0.0
    for group, rows in _groups(rewards, mask):
        for reward, (i, tokens) in zip(group, rows):
            a = reward - sum(group) / len(group)
            for t in tokens:
                total += _ppo(math.exp(logprobs[i, t] - old_logprobs[i, t]), a, epsilon, epsilon) / len(group)
    return total / length / len(rewards)


def _token_mean(rewards, mask, term, advantage):
    """Σ_i Σ_t term / Σ_i |o_i| over the batch."""
    values = []
    for group, rows in _groups(rewards, mask):
        values += [term(a, i, t) for a, (i, tokens) in zip(advantage(group), rows) for t in tokens]
    return math.fsum(values) / len(values)


def paper_dapo(logprobs, old_logprobs, ref_logprobs, rewards, mask, *, epsilon_low, epsilon_high, eps, correction):
    """DAPO, 2503.14476, Eq. 8, with 1/Σ|o_i| over the batch as in its code; printed is that of a group."""

    def term(a, i, t):
        return _ppo(math.exp(logprobs[i, t] - old_logprobs[i, t]), a, epsilon_low, epsilon_high)

    return _token_mean(rewards, mask, term, lambda group: _z(group, eps, correction))


def paper_gspo(logprobs, old_logprobs, ref_logprobs, rewards, mask, *, epsilon_low, epsilon_high, eps, correction):
    """GSPO, 2507.18071, Eq. 5; Â of Eq. 6; s = (π(y)/π_old(y))^(1/|y|), Eq. 7."""
    total = 0.0
    for group, rows in _groups(rewards, mask):
        for a, (i, tokens) in zip(_z(group, eps, correction), rows):
            likelihood, old = (math.prod(math.exp(x[i, t]) for t in tokens) for x in (logprobs, old_logprobs))
            total += _ppo((likelihood / old) ** (1 / len(tokens)), a, epsilon_low, epsilon_high) / len(group)
    return total / len(rewards)


def paper_cispo(logprobs, old_logprobs, ref_logprobs, rewards, mask, *, ratio_max, eps, correction, held=None):
    """CISPO, MiniMax-M1, 2506.13585, Eq. 4 and 5: sg(r̂)·Â·logπ over the tokens.

    `held`: log-probabilities at which sg(r̂) is taken, default `logprobs`; fix them to differentiate.
    """
    held = logprobs if held is None else held

    def term(a, i, t):
        return min(math.exp(held[i, t] - old_logprobs[i, t]), ratio_max) * a * logprobs[i, t]

    return _token_mean(rewards, mask, term, lambda group: _z(group, eps, correction))


def paper_rloo(logprobs, old_logprobs, ref_logprobs, rewards, mask, *, kl_coef):
    """RLOO, 2402.14740: 1/k Σ_i (R_i − mean of the others)·logπ(y_i), the completion as one action, so Σ_t.

    R = r − β·log(π(y)/π_ref(y)), a number without gradient, of the policy that sampled (old_logprobs).
    """
    total = 0.0
    for group, rows in _groups(rewards, mask):
        full = [
            r - kl_coef * sum(old_logprobs[i, t] - ref_logprobs[i, t] for t in tokens)
            for r, (i, tokens) in zip(group, rows)
        ]
        for own, (i, tokens) in zip(full, rows):
            a = own - (sum(full) - own) / (len(full) - 1)
            total += a * sum(logprobs[i, t] for t in tokens) / len(group)
    return total / len(rewards)


def paper_sapo(logprobs, old_logprobs, ref_logprobs, rewards, mask, *, tau_positive, tau_negative, eps, correction):
    """SAPO, 2511.20347, objective and gate: 1/G Σ_i 1/|y_i| Σ_t f(r)Â."""
    total = 0.0
    for group, rows in _groups(rewards, mask):
        for a, (i, tokens) in zip(_z(group, eps, correction), rows):
            tau = tau_positive if a > 0 else tau_negative
            for t in tokens:
                r = math.exp(logprobs[i, t] - old_logprobs[i, t])
                gate = 1 / (1 + math.exp(-tau * (r - 1))) * 4 / tau
                total += gate * a / len(tokens) / len(group)
    return total / len(rewards)


def paper_gmpo(logprobs, old_logprobs, ref_logprobs, rewards, mask, *, epsilon_low, epsilon_high, eps, correction):
    """GMPO, 2507.20673: 1/G Σ_i {Π_t |min(ρÂ, clip(ρ, e^−ε_low, e^ε_high)Â)|}^(1/|o_i|)·sgn(Â)."""
    total = 0.0
    for group, rows in _groups(rewards, mask):
        for a, (i, tokens) in zip(_z(group, eps, correction), rows):
            product = 1.0
            for t in tokens:
                r = math.exp(logprobs[i, t] - old_logprobs[i, t])
                product *= abs(min(r * a, _clip(r, math.exp(-epsilon_low), math.exp(epsilon_high)) * a))
            total += math.copysign(product ** (1 / len(tokens)), a) / len(group)
    return total / len(rewards)


def paper_reinforce_pp(logprobs, old_logprobs, ref_logprobs, rewards, mask, *, epsilon, kl_coef, eps, correction):
    """REINFORCE++ with baseline, 2501.03262: R − group mean, normalised over the batch, PPO clip, k2 as loss term.

    Mean and std count each row once; printed is Â_{q,o_t}, which counts it once per token.
    """
    rows = [row for _, group in _groups(rewards, mask) for row in group]
    raw = [r - sum(group) / len(group) for group in rewards.tolist() for r in group]
    mean, std = _stats(raw, correction)
    values = []
    for a, (i, tokens) in zip(raw, rows):
        scaled = (a - mean) / (std + eps) if std else 0.0
        for t in tokens:
            r = math.exp(logprobs[i, t] - old_logprobs[i, t])
            kl = 0.5 * (logprobs[i, t] - ref_logprobs[i, t]) ** 2
            values.append(_ppo(r, scaled, epsilon, epsilon) - kl_coef * kl)
    return math.fsum(values) / len(values)


# Corrections: log_ratio = log pi_old - log mu, mu the sampler -> factor [B, T], 0 where masked


def _factors(function, log_ratio, mask):
    """function(ratios of the tokens of a row that count, one of them) at every position that counts."""
    out = np.zeros(log_ratio.shape)
    for i, t in zip(*np.nonzero(mask)):
        out[i, t] = function([math.exp(x) for x, m in zip(log_ratio[i], mask[i]) if m], math.exp(log_ratio[i, t]))
    return out


def token_truncation(log_ratio, mask, *, cap):
    """TIS: min(rho, C)."""
    return _factors(lambda _, rho: min(rho, cap), log_ratio, mask)


def token_mask(log_ratio, mask, *, low, high):
    """IcePop: rho 1[a <= rho <= b]."""
    return _factors(lambda _, rho: rho if low <= rho <= high else 0.0, log_ratio, mask)


def sequence_truncation(log_ratio, mask, *, cap):
    """min(prod rho, C)."""
    return _factors(lambda row, _: min(math.prod(row), cap), log_ratio, mask)


def sequence_mask(log_ratio, mask, *, low, high):
    """prod rho 1[a <= prod rho <= b]."""
    return _factors(lambda row, _: math.prod(row) if low <= math.prod(row) <= high else 0.0, log_ratio, mask)


def geometric_mask(log_ratio, mask, *, low, high):
    """1[a <= (prod rho)^(1/n) <= b]."""
    return _factors(lambda row, _: float(low <= math.prod(row) ** (1 / len(row)) <= high), log_ratio, mask)


def corrected_loss(logprobs, entropy, old_logprobs, ref_logprobs, advantages, mask, factor, *, epsilon, kl_coef, bonus):
    """(1 / tokens) sum of f (kl_coef k3 - min(rA, clip(r) A) - bonus H), r = exp(logprobs - old_logprobs)."""
    values = []
    for i, t in zip(*np.nonzero(mask)):
        r, d = math.exp(logprobs[i, t] - old_logprobs[i, t]), ref_logprobs[i, t] - logprobs[i, t]
        kl = math.exp(d) - d - 1
        objective = _ppo(r, advantages[i, t], epsilon, epsilon)
        values.append(factor[i, t] * (kl_coef * kl - objective - bonus * entropy[i, t]))
    return math.fsum(values) / len(values)


def finite_difference(f, x, h=1e-6):
    """Central differences (f(x + h) − f(x − h))/2h of a scalar function, in the shape of x."""
    out = np.zeros(x.shape)
    for index in np.ndindex(*x.shape):
        up, down = x.astype(float), x.astype(float)
        up[index] += h
        down[index] -= h
        out[index] = (f(up) - f(down)) / (2 * h)
    return out
