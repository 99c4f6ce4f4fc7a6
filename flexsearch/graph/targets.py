"""The torch operators that a graph file may name: a closed list, so that a file makes nothing else be looked up.

``torch.ops`` holds operators that open files, load libraries and write into their operands. The names below were chosen
from PyTorch's schemas by these rules: in the ``aten`` namespace; at least one tensor in, and only tensors out; no
argument is written to; no argument is a file name, device stream, storage or generator, and text only where it is a
mode (``approximate``, ``rounding_mode``, ``reduce``, ...); results depend on the operands alone; sizes of results do
not depend on values. Backends' own kernels, backward operators, quantised and sparse tensors are left out, because no
imported model has them. The list is data, not a rule applied to whatever PyTorch is installed: it means the same
everywhere, and checking a graph needs no torch. The overload is free (``add.Tensor``, ``add.Scalar``) except for
``out`` variants; kernels also ask the schema of the overload that they find.

Operators of other namespaces come from libraries of the user. A file may name one, as a description; it is looked up
only if the user's own code has registered it (``flexsearch.register``) or called it in a model that
this process imported: ``trust``.
"""

from __future__ import annotations

import re
from typing import Final

POINTWISE: Final = frozenset(
    """
    __and__ __lshift__ __or__ __rshift__ __xor__
    _conj_physical abs absolute acos acosh add addcdiv addcmul angle arccos arccosh arcsin arcsinh arctan arctan2
    arctanh asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift
    bitwise_xor ceil celu clamp clamp_max clamp_min clip clone conj_physical copysign copy cos cosh deg2rad digamma div
    divide elu eq erf erfc erfinv exp exp2 expm1 fill fix float_power floor floor_divide fmax fmin fmod frac
    gcd ge gelu greater greater_equal gt hardshrink hardsigmoid hardswish hardtanh heaviside hypot i0 igamma
    igammac isfinite isinf isnan isneginf isposinf lcm ldexp le leaky_relu lerp less less_equal lgamma log log10
    log1p log2 log_sigmoid logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit lt
    masked_fill max maximum min minimum mish mul multiply mvlgamma nan_to_num ne neg negative nextafter not_equal
    polygamma positive pow rad2deg reciprocal relu relu6 remainder round rsqrt rsub selu sgn sigmoid sign signbit
    silu sin sinc sinh softplus softshrink special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0
    special_bessel_y1 special_entr special_erfcx special_i0e special_i1 special_i1e special_log_ndtr
    special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1
    special_ndtri special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1 special_spherical_bessel_j0
    special_xlog1py special_zeta sqrt square sub subtract tan tanh threshold true_divide trunc where xlogy
    """.split()  # noqa: SIM905
)
"""Operators that compute each element from the corresponding elements of their operands, which broadcast."""

MIXING: Final = frozenset(
    """
    _adaptive_avg_pool2d _adaptive_avg_pool3d _aminmax _cdist_forward _conj _convolution _embedding_bag
    _embedding_bag_forward_only _euclidean_dist _fft_c2c _fft_c2r _fft_r2c _fused_rms_norm _int_mm _linalg_det
    _linalg_eigh _linalg_slogdet _linalg_solve_ex _linalg_svd _log_softmax _logcumsumexp _masked_softmax
    _native_batch_norm_legit_no_training _neg_view _pdist_forward _prelu_kernel _reshape_alias _safe_softmax
    _softmax _stack _to_copy _trilinear _unsafe_view _upsample_bicubic2d_aa _upsample_bilinear2d_aa
    _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d _weight_norm
    _weight_norm_interface adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d
    adaptive_max_pool2d adaptive_max_pool3d addbmm addmm addmv addr adjoint affine_grid_generator all amax amin
    aminmax any argmax argmin argsort atleast_1d atleast_2d atleast_3d avg_pool1d avg_pool2d avg_pool3d baddbmm
    batch_norm bilinear binary_cross_entropy binary_cross_entropy_with_logits block_diag bmm broadcast_tensors
    broadcast_to bucketize cat cdist chalf channel_shuffle cholesky cholesky_inverse cholesky_solve chunk col2im
    column_stack complex concat concatenate conj constant_pad_nd conv1d conv2d conv3d conv_tbc conv_transpose1d
    conv_transpose2d conv_transpose3d convolution corrcoef cosine_embedding_loss cosine_similarity count_nonzero
    cov cross cross_entropy_loss ctc_loss cummax cummin cumprod cumsum cumulative_trapezoid det diag diag_embed
    diagflat diagonal diagonal_scatter diff dist dot dsplit dstack einsum embedding embedding_bag expand expand_as
    frexp fft_fft fft_fft2 fft_fftn fft_fftshift fft_hfft fft_hfft2 fft_hfftn fft_ifft fft_ifft2 fft_ifftn fft_ifftshift
    fft_ihfft fft_ihfft2 fft_ihfftn fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn flatten flip
    fliplr flipud frobenius_norm full_like gather geqrf ger glu gradient grid_sampler grid_sampler_2d
    grid_sampler_3d group_norm gru gru_cell hinge_embedding_loss histc histogram hsplit hstack huber_loss im2col
    imag index index_add index_fill index_put index_reduce index_select inner instance_norm inverse isclose isin
    isreal istft kl_div kron kthvalue l1_loss layer_norm linalg__powsum linalg_cholesky linalg_cholesky_ex
    linalg_cond linalg_cross linalg_det linalg_diagonal linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh
    linalg_householder_product linalg_inv linalg_inv_ex linalg_ldl_factor linalg_ldl_factor_ex linalg_ldl_solve
    linalg_lu linalg_lu_factor linalg_lu_factor_ex linalg_lu_solve linalg_matmul linalg_matrix_exp
    linalg_matrix_norm linalg_matrix_power linalg_matrix_rank linalg_multi_dot linalg_norm linalg_pinv linalg_qr
    linalg_slogdet linalg_solve linalg_solve_ex linalg_solve_triangular linalg_svd linalg_svdvals linalg_tensorinv
    linalg_tensorsolve linalg_vander linalg_vecdot linalg_vector_norm linear log_sigmoid_forward log_softmax
    logcumsumexp logdet logsumexp lstm lstm_cell lu_solve lu_unpack margin_ranking_loss masked_scatter matmul
    matrix_exp matrix_power max_pool1d max_pool2d max_pool3d mean median mm mode moveaxis movedim mse_loss msort
    multi_margin_loss multilabel_margin_loss multilabel_margin_loss_forward mv nanmean nanmedian nanquantile
    nansum narrow native_batch_norm native_channel_shuffle native_group_norm native_layer_norm new_full new_ones
    new_zeros nll_loss nll_loss2d nll_loss2d_forward nll_loss_forward nll_loss_nd norm nuclear_norm ones_like
    orgqr ormqr outer pad pairwise_distance pdist permute pinverse pixel_shuffle pixel_unshuffle poisson_nll_loss
    polar prelu prod qr quantile ravel real reflection_pad1d reflection_pad2d reflection_pad3d renorm repeat
    repeat_interleave replication_pad1d replication_pad2d replication_pad3d reshape reshape_as resolve_conj
    resolve_neg rms_norm rnn_relu rnn_tanh roll rot90 scaled_dot_product_attention scatter scatter_add
    scatter_reduce searchsorted select select_scatter slice slice_inverse slice_scatter slogdet smooth_l1_loss
    soft_margin_loss softmax sort special_chebyshev_polynomial_t special_chebyshev_polynomial_u
    special_chebyshev_polynomial_v special_chebyshev_polynomial_w special_digamma special_erf special_erfc
    special_erfinv special_exp2 special_expit special_expm1 special_gammainc special_gammaincc special_gammaln
    special_hermite_polynomial_h special_hermite_polynomial_he special_i0 special_laguerre_polynomial_l
    special_legendre_polynomial_p special_log1p special_log_softmax special_logit special_logsumexp
    special_multigammaln special_ndtr special_polygamma special_psi special_round
    special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u
    special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w special_sinc special_softmax
    special_xlogy split split_with_sizes squeeze stack std std_mean stft sum sum_to_size svd swapaxes swapdims t
    take take_along_dim tensor_split tensordot tile to topk trace transpose trapezoid trapz triangular_solve tril
    triplet_margin_loss triu type_as unbind unflatten unfold unsqueeze upsample_bicubic2d upsample_bilinear2d
    upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d vander var
    var_mean vdot view view_as view_as_complex view_as_real vsplit vstack zeros_like
    """.split()  # noqa: SIM905
)
"""Other operators, which ``opaque`` operators of a graph may be."""

_FORM: Final = re.compile(r"(?:torch\.ops\.)?([A-Za-z_]\w{0,99})\.([A-Za-z_]\w{0,199})\.([A-Za-z_]\w{0,99})", re.ASCII)
_trusted: set[str] = set()


def split_target(target: str) -> tuple[str, str, str]:
    """Namespace, operator and overload of ``"aten.add.Tensor"``. Raises ValueError for any other form."""
    match = _FORM.fullmatch(target)
    if match is None:
        raise ValueError("must read LIBRARY.OPERATOR.OVERLOAD, as aten.add.Tensor")
    return match[1], match[2], match[3]


def check_target(target: str) -> None:
    """Raise ValueError unless a graph may name ``target``: an ``aten`` operator of the list, or one of a library."""
    library, name, overload = split_target(target)
    if library == "aten" and (name not in POINTWISE | MIXING or "out" in overload.split("_")):
        raise ValueError("is none of the pure tensor operators of PyTorch that a graph may name")


def trust(target: str) -> None:
    """The user's own code has called or registered ``target`` in this process: it may be looked up from now on."""
    _trusted.add(".".join(split_target(target)))


def trusted(target: str) -> bool:
    """Whether ``target`` may be looked up in ``torch.ops``. Raises ValueError if a graph may not even name it."""
    check_target(target)
    parts = split_target(target)
    return parts[0] == "aten" or ".".join(parts) in _trusted
