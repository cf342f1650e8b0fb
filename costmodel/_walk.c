/* The walk through forests of complete trees, compiled: the same answers as kernelcast.costmodel.walk's numpy walk.
 *
 * pack() checks and copies forests once; walk() predicts rows from the copy. So a prediction asks nothing of the trees
 * again, and no array that is changed or freed in between can lead it out of bounds.
 *
 * Layout. The trees of a forest lie in groups of up to LANES. A group of L trees is one heap with L roots: tree t starts at
 * node L + t, and the children of node n are 2 n (right) and 2 n + 1 (left). What would be node n below the last level is
 * leaf n - (L << depth). All trees of a group step down together, one row at a time: their steps do not wait for each other.
 *
 * Numbers. A float32 is compared by its key, an uint32 of the same order, and a missing value is given one that is below
 * every other or above, as the node's column says. An unsigned comparison leaves its result in the carry, which one
 * instruction adds to the node's number; this is why the left child, that of the smaller value, is the odd one.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Raised with every change of what pack() or walk() take; walk.py asks for the one it was written for. */
#define VERSION 1

#define LANES 10
#define MAX_DEPTH 16
#define MAX_WIDTH ((Py_ssize_t)1 << 20)
/* A node's column is an uint16. */
#define MAX_COLUMNS ((Py_ssize_t)1 << 16)
/* Keys of rows that are walked at a time: they and a group of trees of depth 7 stay in 32 KiB. */
#define TILE_KEYS 4096
/* Some 5 ms of work. Below that the lock is kept: asking for it again can take as long as a thread may hold it. */
#define MANY_STEPS 1e7

#define LINE 64 /* bytes of a line of the cache */
#define AHEAD 8 /* lines of what comes next that are asked for with each row */

#ifdef __GNUC__
#define PREFETCH(place) __builtin_prefetch(place)
#else
#define PREFETCH(place) ((void)(place))
#endif

static const char CAPSULE[] = "kernelcast.costmodel._walk.forests";

typedef struct {
    Py_ssize_t trees;
    Py_ssize_t least;  /* trees of a group; all groups are about as large */
    Py_ssize_t larger; /* groups, from the first, that have one tree more */
    int depth;
    double base;
    char *groups; /* one after the other: keys of thresholds, leaves and columns, [lanes << depth] each */
} Forest;

typedef struct {
    Py_ssize_t width;
    Py_ssize_t columns;
    Py_ssize_t count;
    double steps; /* of a row through all forests */
    uint32_t *source;  /* [columns], feature that the column holds */
    uint32_t *missing; /* [columns], key of a missing value */
    Forest forests[1]; /* [count] */
} Packed;

/* The key of a float32 by its bits. Without a branch: signs of features are hard to foretell. */
static inline uint32_t key_of(uint32_t bits, uint32_t missing)
{
    const uint32_t none = 0u - (uint32_t)((bits & 0x7fffffffu) > 0x7f800000u);
    bits += bits & (0u - (uint32_t)(bits == 0x80000000u)); /* -0 is no less than 0 */
    return ((bits ^ ((0u - (bits >> 31)) | 0x80000000u)) & ~none) | (missing & none);
}

/* Some rows through a group of L trees; what their leaves hold is added to the rows' sums. Meanwhile the group that comes
 * next is asked for: between two predictions a program may have used the whole cache. */
#define DEFINE_GROUP(L)                                                                                             \
    static void group_##L(const char *group, int depth, const char *ahead, const char *end,                         \
                          const uint32_t *restrict row, Py_ssize_t rows, Py_ssize_t columns, double *restrict sum)  \
    {                                                                                                               \
        const size_t first = (size_t)(L) << depth;                                                                  \
        const uint32_t *restrict key = (const void *)group;                                                         \
        const float *restrict leaf = (const void *)(key + first);                                                   \
        const uint16_t *restrict column = (const void *)(leaf + first);                                             \
        for (Py_ssize_t r = 0; r < rows; r++, row += columns) {                                                     \
            size_t node[L];                                                                                         \
            double total = sum[r];                                                                                  \
            for (int line = 0; line < AHEAD && ahead < end; line++, ahead += LINE)                                  \
                PREFETCH(ahead);                                                                                    \
            _Pragma("GCC unroll 10") for (int t = 0; t < (L); t++) node[t] = (L) + t;                               \
            for (int level = depth; level; level--) {                                                               \
                _Pragma("GCC unroll 10") for (int t = 0; t < (L); t++) {                                            \
                    const uint32_t threshold = key[node[t]], value = row[column[node[t]]];                          \
                    /* Not `2 n + (value < threshold)`: of this form compilers make compare and add-with-carry. */  \
                    node[t] = (node[t] + node[t] + 1) - (value >= threshold);                                       \
                }                                                                                                   \
            }                                                                                                       \
            _Pragma("GCC unroll 10") for (int t = 0; t < (L); t++) total += leaf[node[t] - first];                  \
            sum[r] = total;                                                                                         \
        }                                                                                                           \
    }

DEFINE_GROUP(1)
DEFINE_GROUP(2)
DEFINE_GROUP(3)
DEFINE_GROUP(4)
DEFINE_GROUP(5)
DEFINE_GROUP(6)
DEFINE_GROUP(7)
DEFINE_GROUP(8)
DEFINE_GROUP(9)
DEFINE_GROUP(10)

typedef void (*Group)(const char *, int, const char *, const char *, const uint32_t *, Py_ssize_t, Py_ssize_t,
                      double *);

/* By the number of trees. */
static const Group GROUPS[LANES + 1] = {NULL,    group_1, group_2, group_3, group_4, group_5,
                                        group_6, group_7, group_8, group_9, group_10};

/* Trees of the group that starts with a tree. */
static Py_ssize_t lanes_at(const Forest *forest, Py_ssize_t tree)
{
    return forest->least + (tree < forest->larger * (forest->least + 1));
}

/* Bytes of the group that starts with a tree, up to the next line of the cache; 0 where there is no such tree. */
static size_t bytes_at(const Forest *forest, Py_ssize_t tree)
{
    if (tree >= forest->trees)
        return 0;
    const size_t each = sizeof(uint32_t) + sizeof(float) + sizeof(uint16_t);
    return (((size_t)lanes_at(forest, tree) << forest->depth) * each + LINE - 1) / LINE * LINE;
}

static void free_packed(Packed *packed)
{
    if (packed == NULL)
        return;
    for (Py_ssize_t f = 0; f < packed->count; f++)
        free(packed->forests[f].groups);
    free(packed->source);
    free(packed->missing);
    free(packed);
}

static void free_capsule(PyObject *capsule)
{
    free_packed(PyCapsule_GetPointer(capsule, CAPSULE));
}

/* A C-contiguous buffer of values of one kind, whose bytes are what is expected; any, where that is negative. */
static int buffer_of(PyObject *from, Py_buffer *view, const char *kinds, Py_ssize_t size, Py_ssize_t bytes, int more,
                     const char *what)
{
    if (PyObject_GetBuffer(from, view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | more) < 0)
        return -1;
    const char *format = view->format == NULL ? "B" : view->format;
    if (*format == '@' || *format == '=')
        format++;
    if (strlen(format) != 1 || strchr(kinds, *format) == NULL || view->itemsize != size) {
        PyErr_Format(PyExc_ValueError, "%s: values of the format %s and %zd bytes; one of \"%s\" and %zd bytes is expected",
                     what, format, view->itemsize, kinds, size);
    } else if (bytes >= 0 && view->len != bytes) {
        PyErr_Format(PyExc_ValueError, "%s: %zd bytes; %zd are expected", what, view->len, bytes);
    } else {
        return 0;
    }
    PyBuffer_Release(view);
    return -1;
}

/* Copy trees from breadth-first order, left before right, into groups. The sources may lie at any address. */
static int fill(Forest *forest, const char *column, const char *threshold, const char *leaf, Py_ssize_t columns)
{
    const int depth = forest->depth;
    const Py_ssize_t leaves = (Py_ssize_t)1 << depth, nodes = leaves - 1;
    const Py_ssize_t groups = forest->trees ? (forest->trees + LANES - 1) / LANES : 1;
    forest->least = forest->trees / groups;
    forest->larger = forest->trees % groups;
    size_t bytes = 0;
    for (Py_ssize_t tree = 0; tree < forest->trees; tree += lanes_at(forest, tree))
        bytes += bytes_at(forest, tree);
    char *to = forest->groups = calloc(bytes + 1, 1);
    if (to == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t tree = 0; tree < forest->trees;) {
        const Py_ssize_t lanes = lanes_at(forest, tree);
        const size_t taken = bytes_at(forest, tree);
        uint32_t *keys = (void *)to;
        float *leaf_to = (void *)(keys + (lanes << depth));
        uint16_t *column_to = (void *)(leaf_to + (lanes << depth));
        for (const Py_ssize_t end = tree + lanes; tree < end; tree++, leaf_to += leaves) {
            const Py_ssize_t lane = tree - end + lanes;
            for (int level = 0; level < depth; level++) {
                const Py_ssize_t many = (Py_ssize_t)1 << level, last = ((lanes + lane + 1) << level) - 1;
                for (Py_ssize_t place = 0; place < many; place++) {
                    const Py_ssize_t from = tree * nodes + many - 1 + place;
                    uint16_t looked_at;
                    uint32_t bits;
                    memcpy(&looked_at, column + from * 2, 2);
                    memcpy(&bits, threshold + from * 4, 4);
                    if (looked_at >= columns) {
                        PyErr_Format(PyExc_ValueError, "column: a node looks at column %d of %zd", (int)looked_at,
                                     columns);
                        return -1;
                    }
                    column_to[last - place] = looked_at;
                    keys[last - place] = key_of(bits, 0xffffffffu);
                }
            }
            for (Py_ssize_t place = 0; place < leaves; place++)
                memcpy(&leaf_to[leaves - 1 - place], leaf + (tree * leaves + place) * 4, 4);
        }
        to += taken;
    }
    return 0;
}

static int pack_forest(Forest *forest, PyObject *from, Py_ssize_t columns)
{
    PyObject *column_from, *threshold_from, *leaf_from;
    Py_buffer column, threshold, leaf;
    int done = -1;
    if (!PyArg_ParseTuple(from, "idOOO;a forest is (depth, base, column, threshold, leaf)", &forest->depth,
                          &forest->base, &column_from, &threshold_from, &leaf_from))
        return -1;
    if (forest->depth < 0 || forest->depth > MAX_DEPTH) {
        PyErr_Format(PyExc_ValueError, "depth: %d; 0 to %d is expected", forest->depth, MAX_DEPTH);
        return -1;
    }
    if (buffer_of(leaf_from, &leaf, "f", 4, -1, 0, "leaf") < 0)
        return -1;
    forest->trees = (leaf.len / 4) >> forest->depth;
    const Py_ssize_t nodes = forest->trees * (((Py_ssize_t)1 << forest->depth) - 1);
    if ((forest->trees << forest->depth) * 4 != leaf.len) {
        PyErr_Format(PyExc_ValueError, "leaf: %zd bytes are not those of whole trees of depth %d", leaf.len,
                     forest->depth);
    } else if (buffer_of(column_from, &column, "H", 2, nodes * 2, 0, "column") == 0) {
        if (buffer_of(threshold_from, &threshold, "f", 4, nodes * 4, 0, "threshold") == 0) {
            done = fill(forest, column.buf, threshold.buf, leaf.buf, columns);
            PyBuffer_Release(&threshold);
        }
        PyBuffer_Release(&column);
    }
    PyBuffer_Release(&leaf);
    return done;
}

PyDoc_STRVAR(pack_doc,
             "pack(width, looked_at, forests)\n--\n\n"
             "Check and copy forests for walk().\n\n"
             "looked_at: int32 [columns], up to 65,536 of them; the features that nodes look at. From `width` on they\n"
             "are the same features again, with a missing value above everything; below, it is below.\n"
             "forests: tuple of (depth, base, column, threshold, leaf), where column is uint16 [trees, nodes], a place\n"
             "in looked_at, threshold float32 [trees, nodes] and leaf float32 [trees, leaves], breadth first.\n\n"
             "Raises ValueError or TypeError where these do not fit together.");

static PyObject *pack(PyObject *module, PyObject *args)
{
    Py_ssize_t width;
    PyObject *columns_from, *forests;
    Py_buffer view;
    (void)module;
    if (!PyArg_ParseTuple(args, "nOO!:pack", &width, &columns_from, &PyTuple_Type, &forests))
        return NULL;
    const Py_ssize_t count = PyTuple_Size(forests);
    if (width < 1 || width > MAX_WIDTH || count < 1) {
        PyErr_Format(PyExc_ValueError,
                     "%zd forests of the width %zd; at least one, and a width of 1 to %zd, is expected", count, width,
                     MAX_WIDTH);
        return NULL;
    }
    if (buffer_of(columns_from, &view, "il", 4, -1, 0, "looked_at") < 0)
        return NULL;
    const Py_ssize_t columns = view.len / 4;
    Packed *packed = calloc(1, sizeof(Packed) + (size_t)count * sizeof(Forest));
    if (packed == NULL) {
        PyErr_NoMemory();
        goto fail;
    }
    packed->width = width;
    packed->columns = columns;
    packed->count = count;
    packed->source = calloc((size_t)columns + 1, sizeof *packed->source);
    packed->missing = calloc((size_t)columns + 1, sizeof *packed->missing);
    if (packed->source == NULL || packed->missing == NULL) {
        PyErr_NoMemory();
        goto fail;
    }
    if (columns > MAX_COLUMNS) {
        PyErr_Format(PyExc_ValueError, "looked_at: %zd columns; at most %zd are expected", columns, MAX_COLUMNS);
        goto fail;
    }
    for (Py_ssize_t column = 0; column < columns; column++) {
        int32_t feature;
        memcpy(&feature, (const char *)view.buf + column * 4, 4);
        if (feature < 0 || feature >= 2 * width) {
            PyErr_Format(PyExc_ValueError, "looked_at: feature %d of twice %zd", (int)feature, width);
            goto fail;
        }
        packed->source[column] = (uint32_t)(feature < width ? feature : feature - width);
        packed->missing[column] = feature < width ? 0 : 0xffffffffu;
    }
    for (Py_ssize_t f = 0; f < count; f++) {
        PyObject *from = PyTuple_GetItem(forests, f);
        if (!PyTuple_Check(from)) {
            PyErr_SetString(PyExc_TypeError, "forests: a tuple of tuples is expected");
            goto fail;
        }
        if (pack_forest(&packed->forests[f], from, columns) < 0)
            goto fail;
        packed->steps += (double)packed->forests[f].trees * (packed->forests[f].depth + 1);
    }
    PyObject *capsule = PyCapsule_New(packed, CAPSULE, free_capsule);
    if (capsule == NULL)
        goto fail;
    PyBuffer_Release(&view);
    return capsule;
fail:
    free_packed(packed);
    PyBuffer_Release(&view);
    return NULL;
}

static void walk_all(const Packed *packed, const char *features, Py_ssize_t rows, double *out, uint32_t *keys,
                     Py_ssize_t tile)
{
    const Py_ssize_t columns = packed->columns;
    const uint32_t *restrict source = packed->source, *restrict missing = packed->missing;
    memset(out, 0, (size_t)packed->count * (size_t)rows * sizeof *out);
    for (Py_ssize_t start = 0; start < rows; start += tile) {
        const Py_ssize_t some = rows - start < tile ? rows - start : tile;
        for (Py_ssize_t row = 0; row < some; row++) {
            const char *from = features + (size_t)(start + row) * (size_t)packed->width * sizeof(float);
            uint32_t *restrict key = keys + row * columns;
            for (Py_ssize_t column = 0; column < columns; column++)
                memcpy(&key[column], from + source[column] * sizeof(float), sizeof(float));
            for (Py_ssize_t column = 0; column < columns; column++)
                key[column] = key_of(key[column], missing[column]);
        }
        for (Py_ssize_t f = 0; f < packed->count; f++) {
            const Forest *forest = &packed->forests[f];
            const char *group = forest->groups;
            for (Py_ssize_t tree = 0, lanes; tree < forest->trees; tree += lanes) {
                lanes = lanes_at(forest, tree);
                const char *next = group + bytes_at(forest, tree);
                GROUPS[lanes](group, forest->depth, next, next + bytes_at(forest, tree + lanes), keys, some, columns,
                              out + f * rows + start);
                group = next;
            }
        }
    }
    for (Py_ssize_t f = 0; f < packed->count; f++)
        for (Py_ssize_t row = 0; row < rows; row++)
            out[f * rows + row] += packed->forests[f].base;
}

PyDoc_STRVAR(walk_doc,
             "walk(packed, features, out)\n--\n\n"
             "Predict rows.\n\n"
             "packed: what pack() gave.\n"
             "features: float32 [rows, width], C-contiguous.\n"
             "out: float64 [forests, rows], C-contiguous; written.\n\n"
             "Raises ValueError, TypeError or BufferError where these do not fit together.");

static PyObject *walk(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    Py_buffer features, out;
    PyObject *answer = NULL;
    (void)module;
    if (given != 3) {
        PyErr_Format(PyExc_TypeError, "walk() takes 3 arguments; %zd were given", given);
        return NULL;
    }
    const Packed *packed = PyCapsule_GetPointer(args[0], CAPSULE);
    if (packed == NULL || buffer_of(args[1], &features, "f", 4, -1, 0, "features") < 0)
        return NULL;
    if (buffer_of(args[2], &out, "d", 8, -1, PyBUF_WRITABLE, "out") < 0) {
        PyBuffer_Release(&features);
        return NULL;
    }
    if (features.ndim != 2 || features.shape[1] != packed->width) {
        PyErr_Format(PyExc_ValueError, "features: rows of %zd values are expected", packed->width);
    } else if (out.ndim != 2 || out.shape[0] != packed->count || out.shape[1] != features.shape[0]) {
        PyErr_Format(PyExc_ValueError, "out: the shape [%zd, %zd] is expected", packed->count, features.shape[0]);
    } else if ((uintptr_t)out.buf % sizeof(double)) {
        PyErr_SetString(PyExc_ValueError, "out: not aligned");
    } else {
        const Py_ssize_t rows = features.shape[0], columns = packed->columns;
        const Py_ssize_t most = columns ? TILE_KEYS / columns : TILE_KEYS, tile = most ? most : 1;
        uint32_t *keys = malloc(((size_t)tile * (size_t)columns + 1) * sizeof *keys);
        if (keys == NULL) {
            PyErr_NoMemory();
        } else {
            PyThreadState *state = packed->steps * (double)rows > MANY_STEPS ? PyEval_SaveThread() : NULL;
            walk_all(packed, features.buf, rows, out.buf, keys, tile);
            if (state != NULL)
                PyEval_RestoreThread(state);
            free(keys);
            answer = Py_None;
            Py_INCREF(answer);
        }
    }
    PyBuffer_Release(&out);
    PyBuffer_Release(&features);
    return answer;
}

static PyMethodDef methods[] = {
    {"pack", pack, METH_VARARGS, pack_doc},
    {"walk", (PyCFunction)(void (*)(void))walk, METH_FASTCALL, walk_doc},
    {NULL, NULL, 0, NULL},
};

static int execute(PyObject *module)
{
    return PyModule_AddIntConstant(module, "VERSION", VERSION) < 0 ||
                   PyModule_AddIntConstant(module, "MAX_COLUMNS", MAX_COLUMNS) < 0
               ? -1
               : 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)execute}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    "kernelcast.costmodel._walk",
    "The walk through forests of complete trees, compiled.",
    0,
    methods,
    slots,
    NULL,
    NULL,
    NULL,
};

PyMODINIT_FUNC PyInit__walk(void)
{
    return PyModuleDef_Init(&definition);
}
