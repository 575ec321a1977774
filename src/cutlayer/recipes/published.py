"""The numbers that papers print, typed once."""

from collections.abc import Mapping
from dataclasses import dataclass

from cutlayer.recipes.recipe import Published

# Best top-1 accuracy in percent, its standard deviation over three seeds, rounds to 0.9 of FedAvg's best accuracy; then
# the speed-up in rounds over the family's base as a number, or simulated hours to the same accuracy as words. A paper
# may print only the first, or the first two.
Cell = tuple[float] | tuple[float, float] | tuple[float, float, str, float | str]


@dataclass(frozen=True, kw_only=True)
class PaperTable:
    """A table as its paper prints it: a row for each method, a cell for each panel."""

    panels: tuple[str, ...]
    rows: Mapping[str, tuple[Cell, ...]]

    def by_run(self, recipe: str) -> dict[str, Published]:
        """The cells, by the names that the recipe's runs have."""
        return {
            f"{recipe}/{panel}/{label}": _published(cell)
            for label, cells in self.rows.items()
            for panel, cell in zip(self.panels, cells, strict=True)
        }


def _published(cell: Cell) -> Published:
    if len(cell) == 1:
        return Published(accuracy=cell[0])
    if len(cell) == 2:
        return Published(accuracy=cell[0], std=cell[1])
    accuracy, std, rounds, gain = cell
    if isinstance(gain, str):
        return Published(accuracy=accuracy, std=std, rounds=rounds, hours=gain)
    return Published(accuracy=accuracy, std=std, rounds=rounds, speed_up=gain)


SMOFI_TABLE1 = PaperTable(
    panels=("cifar10", "cifar100", "tiny"),
    rows={
        "fedavg": ((77.16, 0.11, "258", 1.00), (48.10, 0.36, "183", 1.00), (33.43, 0.12, "161", 1.00)),
        "fedavgm": ((79.19, 0.09, "190", 1.36), (50.28, 0.26, "126", 1.45), (33.58, 0.34, "57", 2.82)),
        "slowmo": ((76.54, 0.06, "177", 1.46), (50.96, 0.23, "125", 1.46), (33.82, 0.29, "44", 3.66)),
        "fednag": ((78.24, 0.43, "170", 1.52), (48.30, 1.06, "198", 0.92), (30.94, 0.44, "335", 0.48)),
        "smofi": ((81.82, 0.61, "56", 4.61), (53.83, 0.79, "64", 2.86), (39.73, 0.05, "16", 10.06)),
        "fedprox": ((77.38, 0.01, "167", 1.00), (48.67, 0.06, "175", 1.00), (34.86, 0.89, "120", 1.00)),
        "fedprox+fedavgm": ((79.26, 0.65, "207", 0.81), (50.45, 0.13, "111", 1.58), (34.25, 0.20, "50", 2.40)),
        "fedprox+slowmo": ((76.63, 0.09, "210", 0.80), (51.44, 0.65, "122", 1.43), (33.67, 0.22, "85", 1.41)),
        "fedprox+fednag": ((77.59, 0.80, "200", 0.84), (48.95, 0.04, "169", 1.04), (31.20, 0.21, "284", 0.42)),
        "fedprox+smofi": ((81.99, 0.37, "54", 3.09), (54.03, 0.31, "71", 2.46), (40.79, 0.13, "13", 9.23)),
        "fednar": ((77.21, 0.06, "255", 1.00), (48.02, 0.31, "183", 1.00), (33.37, 0.34, "164", 1.00)),
        "fednar+fedavgm": ((79.21, 0.47, "190", 1.34), (50.80, 0.23, "120", 1.53), (33.63, 0.76, "105", 1.56)),
        "fednar+slowmo": ((76.71, 0.20, "199", 1.28), (51.94, 0.18, "123", 1.49), (33.57, 0.48, "161", 1.02)),
        "fednar+fednag": ((77.94, 0.53, "199", 1.28), (48.51, 0.24, "175", 1.05), (34.17, 0.27, "63", 2.60)),
        "fednar+smofi": ((81.65, 0.65, "46", 5.54), (53.72, 0.42, "67", 2.73), (40.47, 0.11, "16", 10.25)),
    },
)

SMOFI_TABLE2 = PaperTable(
    panels=("cifar10", "cifar100", "tiny"),
    rows={
        "sfl_v1-step": (
            (68.10, 0.57, ">1000", ">551.62"),
            (38.43, 0.06, ">600", ">172.66"),
            (21.81, 0.98, ">400", ">578.95"),
        ),
        "sfl_v1-epoch": ((77.84, 0.17, "69", "28.62"), (46.68, 0.21, "40", "10.23"), (35.47, 0.12, "44", "58.57")),
        "sfl_v2": ((79.42, 0.04, "278", "144.50"), (53.64, 0.51, "143", "42.58"), (34.72, 0.95, "310", "527.48")),
        "mergesfl": ((79.47, 0.09, "76", "15.84"), (50.16, 0.20, "53", "11.22"), (34.74, 0.55, "118", "152.25")),
        "smofi": ((81.82, 0.61, "56", "29.02"), (53.83, 0.79, "64", "18.46"), (39.73, 0.05, "16", "23.02")),
    },
)

SMOFI_TABLE3_DIR05 = PaperTable(
    panels=("cifar10-dir05", "cifar100-dir05", "tiny-dir05"),
    rows={
        "fedavg": ((82.04, 0.22, "85", 1.00), (48.35, 0.58, "164", 1.00), (31.57, 2.43, "126", 1.00)),
        "fedavgm": ((82.67, 0.24, "65", 1.31), (51.70, 0.67, "114", 1.44), (33.87, 1.00, "100", 1.26)),
        "slowmo": ((81.17, 0.30, "101", 0.84), (52.78, 0.25, "100", 1.64), (35.60, 0.41, "37", 3.41)),
        "fednag": ((82.26, 0.14, "75", 1.13), (49.98, 0.52, "147", 1.12), (31.88, 0.11, "241", 0.52)),
        "smofi": ((84.62, 0.07, "34", 2.50), (55.54, 0.11, "55", 2.98), (40.90, 0.33, "12", 10.50)),
    },
)

SMOFI_TABLE3_IID = PaperTable(
    panels=("cifar10-iid", "cifar100-iid", "tiny-iid"),
    rows={
        "fedavg": ((83.52, 0.20, "44", 1.00), (50.29, 0.15, "164", 1.00), (32.38, 0.67, "147", 1.00)),
        "fedavgm": ((84.50, 0.11, "33", 1.33), (53.47, 0.06, "109", 1.50), (35.90, 1.27, "35", 4.20)),
        "slowmo": ((83.24, 0.04, "55", 0.80), (54.66, 0.07, "89", 1.84), (34.99, 1.68, "85", 1.73)),
        "fednag": ((84.36, 0.03, "42", 1.05), (50.72, 0.04, "171", 0.96), (31.87, 0.44, "252", 0.58)),
        "smofi": ((86.88, 0.15, "14", 3.14), (55.46, 0.18, "60", 2.73), (42.48, 0.32, "11", 13.36)),
    },
)

SMOFI_TABLE4 = PaperTable(
    panels=("tiny-j10", "tiny-j20", "tiny-j30"),
    rows={
        "fedavg": ((31.66, 0.05, "111", 1.00), (32.96, 0.62, "125", 1.00), (33.15, 0.53, "139", 1.00)),
        "fedavgm": ((33.25, 1.28, "96", 1.16), (34.38, 0.84, "58", 2.16), (34.89, 0.05, "53", 2.62)),
        "slowmo": ((33.98, 0.19, "165", 0.67), (34.91, 0.24, "64", 1.95), (34.40, 0.72, "58", 2.40)),
        "fednag": ((31.14, 0.18, "227", 0.49), (31.43, 1.11, "244", 0.51), (31.28, 1.02, "284", 0.49)),
        "smofi": ((38.23, 0.64, "63", 1.76), (39.58, 0.46, "25", 5.00), (39.70, 0.26, "20", 6.95)),
    },
)

SMOFI_TABLE5 = PaperTable(
    panels=("shakespeare", "google_speech"),
    rows={
        "fedavg": ((46.08, 0.53, "170", 1.00), (90.84, 0.11, "31", 1.00)),
        "fedavgm": ((49.13, 0.29, "62", 2.74), (91.14, 0.07, "24", 1.29)),
        "slowmo": ((47.62, 0.74, "85", 2.00), (90.47, 0.02, "54", 0.57)),
        "fednag": ((42.56, 2.59, "210", 0.81), (90.46, 0.05, "49", 0.63)),
        "smofi": ((51.83, 0.21, "74", 2.30), (90.41, 0.05, "13", 2.38)),
    },
)

CUT_TABLE3 = PaperTable(
    panels=("cifar10", "cifar100", "tiny"),
    rows={
        "fedavg": ((85.25, 0.07), (48.48, 0.38), (47.49, 0.07)),
        "sfl_v1-cut1": ((86.34, 0.37), (49.56, 0.18), (48.73, 0.43)),
        "sfl_v1-cut2": ((86.12, 0.46), (50.28, 0.76), (49.26, 0.78)),
        "sfl_v1-cut3": ((85.94, 0.36), (49.29, 0.11), (49.11, 0.70)),
        "sfl_v1-cut4": ((86.01, 0.45), (46.59, 1.42), (48.11, 0.27)),
        "sfl_v2-cut1": ((92.30, 0.15), (56.00, 0.69), (54.77, 0.22)),
        "sfl_v2-cut2": ((89.56, 0.15), (45.93, 0.21), (50.86, 0.05)),
        "sfl_v2-cut3": ((87.57, 0.34), (41.29, 0.26), (44.15, 0.11)),
        "sfl_v2-cut4": ((86.11, 0.36), (45.98, 0.24), (43.85, 0.25)),
    },
)

CUT_TABLE4 = PaperTable(
    panels=("ham10000", "cifar10", "cifar100", "tiny"),
    rows={
        "fedavg": ((77.37, 0.35), (67.59, 2.52), (42.60, 1.18), (28.33, 0.28)),
        "sfl_v1-cut1": ((77.88, 0.13), (66.38, 2.22), (39.96, 0.84), (12.84, 0.73)),
        "sfl_v1-cut2": ((78.18, 0.67), (65.64, 1.49), (39.82, 0.63), (13.42, 0.60)),
        "sfl_v1-cut3": ((78.40, 0.66), (65.36, 1.09), (40.32, 0.88), (13.66, 0.97)),
        "sfl_v1-cut4": ((78.10, 0.83), (64.51, 1.84), (41.24, 1.18), (13.89, 1.00)),
        "sfl_v2-cut1": ((80.58, 0.35), (67.58, 6.28), (52.38, 0.97), (30.14, 8.58)),
        "sfl_v2-cut2": ((79.56, 0.88), (59.98, 11.99), (45.90, 1.08), (22.55, 2.28)),
        "sfl_v2-cut3": ((79.26, 0.54), (61.73, 4.04), (42.42, 0.99), (27.08, 1.48)),
        "sfl_v2-cut4": ((78.27, 0.65), (69.45, 0.64), (43.31, 1.17), (26.42, 1.52)),
    },
)

# Runs that the paper leaves out; its authors' result files hold them.
CUT_LEFT_OUT = {
    "cut_table3_as_run/tiny/fedavg-sgd": Published(accuracy=57.40, std=0.38),
    "cut_table4_as_run/ham10000/fedavg-sgd": Published(accuracy=76.83, std=0.25),
}


@dataclass(frozen=True, kw_only=True)
class Text:
    """What a paper's text says of converged runs beside the first: by panel and label, points below it and times it."""

    cells: Mapping[str, Mapping[str, tuple[str, str]]]

    def by_run(self, recipe: str) -> dict[str, Published]:
        """The cells, by the names that the recipe's runs have."""
        return {
            f"{recipe}/{panel}/{label}": Published(points_below=points, times_first=times)
            for panel, row in self.cells.items()
            for label, (points, times) in row.items()
        }


HASFL_FIG6 = Text(  # of Section VII-B
    cells={
        "cifar10-iid": {"habs_rms": ("1.3", "~6"), "rbs_rms": ("", "9.4")},
        "cifar10-shards": {"habs_rms": ("5.6", "4.8"), "rbs_rms": ("", "9.4")},
        "cifar100-iid": {"habs_rms": ("2.4", "~15"), "rbs_rms": ("", "6.4")},
        "cifar100-shards": {"habs_rms": ("2.0", "13.4"), "rbs_rms": ("", "6.4")},
    },
)

HOSFL_TABLE1 = PaperTable(
    panels=(
        *("opt-sst2", "opt-wsc", "opt-rte"),
        *("gemma-sst2", "gemma-wsc", "gemma-rte"),
        *("llama-sst2", "llama-wsc", "llama-rte"),
    ),
    rows={
        "splitlora": ((87.5,), (64.4,), (57.8,), (90.3,), (61.5,), (59.6,), (94.4,), (61.5,), (70.0,)),
        "zo_sfl": ((52.8,), (36.5,), (52.0,), (51.8,), (36.5,), (54.2,), (61.5,), (36.5,), (49.1,)),
        "hosfl": ((87.6,), (60.6,), (59.2,), (90.8,), (62.5,), (65.0,), (93.9,), (61.5,), (73.3,)),
    },
)

HOSFL_TABLE2 = PaperTable(
    panels=("cifar10-iid", "cifar10-dir1", "cifar100-iid", "cifar100-dir1"),
    rows={
        "sfl_v1": ((77.5, 0.5), (69.3, 2.6), (43.2, 0.4), (39.5, 0.6)),
        "fsl_sage": ((62.1, 1.5), (37.9, 2.9), (8.3, 4.2), (4.0, 3.0)),
        "zo_sfl": ((12.3, 1.0), (11.8, 1.2), (1.2, 0.2), (1.2, 0.1)),
        "mu_splitfed": ((14.0, 0.9), (13.6, 1.0), (1.3, 0.1), (1.3, 0.1)),
        "hosfl": ((75.0, 0.3), (69.6, 0.8), (44.2, 0.3), (42.5, 0.9)),
    },
)

# GiB up: activations, models, scalars; and down: gradients, models, scalars and seeds.
HOSFL_TABLE3: Mapping[str, tuple[str, ...]] = {
    "sfl_v1": ("1.26", "0.84", "0.0", "1.26", "0.84", "0.0"),
    "fsl_sage": ("0.29", "0.84", "0.0", "0.00", "2.58", "0.0"),
    "zo_sfl": ("2.52", "0.84", "0.0", "0.00", "0.84", "0.00002"),
    "mu_splitfed": ("3.67", "12.97", "0.0", "0.00", "12.97", "0.00002"),
    "hosfl": ("1.22", "0.00", "0.0002", "1.22", "0.00", "0.004"),
}

HOSFL_FIG7 = PaperTable(  # in words, Appendix C.3
    panels=("llama-sst2",),
    rows={"cut2": ((94.5,),), "cut8": ((93.0,),)},
)
