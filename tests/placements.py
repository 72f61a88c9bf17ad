# SPDX-License-Identifier: Apache-2.0
"""What CAFormer costs with (C)SKA in each place: counted on models, and printed in the docs."""

from __future__ import annotations

C, A, SKA, CSKA = "sep_conv", "softmax", "static_key", "conv_static_key"

# mixer a stage: trainable parameters and FLOPs (2 x multiply-adds) in G, of S18 and of B36
PLACEMENTS: dict[tuple[str, ...], tuple[int, str, int, str]] = {
    (C, C, C, C): (26_774_448, "7.882", 99_882_616, "45.259"),  # ConvFormer
    (C, C, A, A): (26_341_656, "8.214", 98_753_614, "46.321"),  # CAFormer
    (C, SKA, A, A): (26_555_922, "9.022", 100_074_550, "52.169"),
    (C, C, SKA, A): (25_984_536, "7.853", 95_841_358, "44.471"),
    (C, C, A, SKA): (25_630_488, "8.137", 97_097_038, "46.148"),
    (C, C, SKA, SKA): (25_273_368, "7.776", 94_184_782, "44.298"),
    (C, SKA, SKA, A): (26_198_802, "8.661", 97_162_294, "50.319"),
    (C, CSKA, A, A): (28_973_778, "12.798", 119_417_398, "82.380"),
    (C, C, CSKA, A): (30_518_016, "9.623", 110_348_494, "50.136"),
    (C, C, A, CSKA): (26_234_952, "8.196", 98_003_734, "46.236"),
    (C, C, CSKA, CSKA): (30_411_312, "9.605", 109_598_614, "50.051"),
}

# the same where the tokens are the queries of static keys
WITHOUT_QUERIES: dict[tuple[str, ...], tuple[int, str, int, str]] = {
    (C, SKA, A, A): (26_506_770, "8.945", 99_288_118, "50.936"),
    (C, C, SKA, A): (25_062_936, "7.491", 91_122_766, "42.622"),
    (C, C, A, SKA): (24_844_056, "8.060", 95_327_566, "45.974"),
    (C, C, SKA, SKA): (23_565_336, "7.337", 87_696_718, "42.275"),
    (C, SKA, SKA, A): (25_228_050, "8.222", 91_657_270, "47.236"),
}
