/* The estimate of kernelcast.featurizer.tiles, compiled: what its `_estimate` does in numpy, in one pass over the configs.
 *
 * The formulas are explained there; a test compares the two on every kind of problem.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <math.h>
#include <stdint.h>
#include <string.h>

/* Raised with every change of what estimate() takes; tiles.py asks for the one it was written for. */
#define VERSION 1

/* Order of the numbers of a problem, of the facts of a config, and of the columns: as in tiles.py. */
enum { SIZE_M, SIZE_N, SIZE_K, CORES, WORK, LEAST, LAUNCH, BYTES_A, BYTES_B, BYTES_C, CACHED_A, CACHED_B, CYCLES_PER_BYTE,
       NARROW, SIMT, PAGED, LATENCY, GROUP_ROWS, NUMBERS };
enum { BLOCK_M, BLOCK_N, BLOCK_K, MULTIPLY, BOUND, PAGE_CUBED, WAIT, STORE, LIFE_STEP, LIFE_START, QUARTER_WARPS, AHEAD,
       READS, VOLUME, COPIED };
enum { COPIED_FACTS = 11, FACTS = COPIED + COPIED_FACTS, LOGGED = 8, COUNTED = 13, COLUMNS = COUNTED + COPIED_FACTS };
#define MOST_TURNS 64.0

static double least_of(double a, double b) { return a < b ? a : b; }
static double most_of(double a, double b) { return a > b ? a : b; }
static double cubed(double a) { return a * a * a; }

static void row_of(const double *of, const double *fact, Py_ssize_t step, char *out, Py_ssize_t out_step)
{
#define F(name) fact[(name) * step]
    const double counts[3] = {of[SIZE_M] / F(BLOCK_M), of[SIZE_N] / F(BLOCK_N), of[SIZE_K] / F(BLOCK_K)};
    const double rows = ceil(counts[0]), columns = ceil(counts[1]), steps = ceil(counts[2]);
    const double resident = F(COPIED), warps = F(QUARTER_WARPS), multiply = F(MULTIPLY);
    const double tiles = rows * columns, even = tiles / of[CORES], turns = ceil(even);
    const double active = least_of(turns, resident), rounds = ceil(turns / resident);
    double cycles;
    if (of[SIMT] != 0.0)
        cycles = most_of(multiply / sqrt(least_of(active * warps * 0.5, 1.0)) + F(READS), F(BOUND));
    else
        cycles = most_of(multiply / least_of(active * warps, 1.0), F(BOUND));
    if (of[PAGED] != 0.0)
        cycles = cbrt(cubed(cycles) + F(PAGE_CUBED));
    if (of[NARROW] != 0.0)
        cycles = most_of(cycles, (of[LATENCY] + cycles / active) / active);
    else
        cycles = most_of(cycles, F(WAIT) / active);
    const double busy = turns * (steps * cycles + F(STORE)) + rounds * (2.0 * of[LATENCY]);
    const double life = rounds * (steps * F(LIFE_STEP) + F(LIFE_START));

    const double group = least_of(rows, of[GROUP_ROWS]);
    const double beside = least_of(most_of(least_of(of[CORES] * resident, tiles) / group, 1.0), columns);
    const double traffic = of[BYTES_C] + (of[CACHED_A] != 0.0 ? of[BYTES_A] : of[BYTES_A] * ceil(columns / beside))
                           + (of[CACHED_B] != 0.0 ? of[BYTES_B] : of[BYTES_B] * ceil(rows / group));
    const double memory = traffic * of[CYCLES_PER_BYTE];
    const double total = cbrt(cubed(busy) + cubed(memory) + cubed(life)) + of[LAUNCH];

    const double found[COUNTED] = {
        log2(total / of[LEAST]), log2(memory / busy), log2(life / busy), log2(turns * steps * F(VOLUME) / of[WORK]),
        log2(traffic / (of[BYTES_A] + of[BYTES_B] + of[BYTES_C])), log2(steps / F(AHEAD)), log2(cycles / multiply),
        log2(active * warps), least_of(turns, MOST_TURNS), even / turns, rows / counts[0], columns / counts[1],
        steps / counts[2],
    };
    for (int column = 0; column < COUNTED; column++)
        memcpy(out + column * out_step, &found[column], sizeof(double));
    for (int column = 0; column < COPIED_FACTS; column++)
        memcpy(out + (COUNTED + column) * out_step, &F(COPIED + column), sizeof(double));
#undef F
}

/* float64 values in rows of which each lies together; the rows may be apart. */
static int rows_of(PyObject *from, Py_buffer *view, Py_ssize_t rows, int more, const char *what)
{
    if (PyObject_GetBuffer(from, view, PyBUF_STRIDES | PyBUF_FORMAT | more) < 0)
        return -1;
    if (view->format == NULL || strcmp(view->format, "d") || view->ndim != 2 || view->shape[0] != rows
        || (view->shape[1] > 1 && view->strides[1] != (Py_ssize_t)sizeof(double)) || (uintptr_t)view->buf % sizeof(double)
        || view->strides[0] % (Py_ssize_t)sizeof(double)) {
        PyErr_Format(PyExc_ValueError, "%s: float64 [%zd, configs] is expected, each row together and aligned", what, rows);
        PyBuffer_Release(view);
        return -1;
    }
    return 0;
}

PyDoc_STRVAR(estimate_doc,
             "estimate(numbers, facts, out)\n--\n\n"
             "Write the columns of tiles.\n\n"
             "numbers: float64 [1, numbers of a problem]. facts: float64 [facts, configs]. out: float64 [columns, configs], written.\n\n"
             "Raises ValueError, TypeError or BufferError where these do not fit together.");

static PyObject *estimate(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    Py_buffer numbers, facts, out;
    PyObject *answer = NULL;
    (void)module;
    if (given != 3) {
        PyErr_Format(PyExc_TypeError, "estimate() takes 3 arguments; %zd were given", given);
        return NULL;
    }
    if (rows_of(args[0], &numbers, 1, 0, "numbers") < 0)
        return NULL;
    if (rows_of(args[1], &facts, FACTS, 0, "facts") == 0) {
        if (rows_of(args[2], &out, COLUMNS, PyBUF_WRITABLE, "out") == 0) {
            if (numbers.shape[1] != NUMBERS || out.shape[1] != facts.shape[1]) {
                PyErr_Format(PyExc_ValueError, "%zd numbers and %zd configs for %zd places; %d numbers and as many places are expected",
                             numbers.shape[1], facts.shape[1], out.shape[1], NUMBERS);
            } else {
                for (Py_ssize_t row = 0; row < facts.shape[1]; row++)
                    row_of(numbers.buf, (const double *)facts.buf + row, facts.strides[0] / (Py_ssize_t)sizeof(double),
                           (char *)out.buf + row * (Py_ssize_t)sizeof(double), out.strides[0]);
                answer = Py_None;
                Py_INCREF(answer);
            }
            PyBuffer_Release(&out);
        }
        PyBuffer_Release(&facts);
    }
    PyBuffer_Release(&numbers);
    return answer;
}

static PyMethodDef methods[] = {
    {"estimate", (PyCFunction)(void (*)(void))estimate, METH_FASTCALL, estimate_doc},
    {NULL, NULL, 0, NULL},
};

static int execute(PyObject *module) { return PyModule_AddIntConstant(module, "VERSION", VERSION); }

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)execute}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "kernelcast.featurizer._tiles", "The estimate of tiles, compiled.", 0, methods, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__tiles(void) { return PyModuleDef_Init(&definition); }
