"""The operators that resize images, and over how many last dims."""

UPSAMPLED = {
    "upsample_nearest1d": 1, "_upsample_nearest_exact1d": 1, "upsample_linear1d": 1, "upsample_nearest2d": 2,
    "_upsample_nearest_exact2d": 2, "upsample_bilinear2d": 2, "upsample_bicubic2d": 2, "_upsample_bilinear2d_aa": 2,
    "_upsample_bicubic2d_aa": 2, "upsample_nearest3d": 3, "_upsample_nearest_exact3d": 3, "upsample_trilinear3d": 3,
}  # fmt: skip
