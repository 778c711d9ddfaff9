// A stand-in for NVIDIA's libcuda.so.1 over one memfd and mmap, so that the real `cuda.bindings` runs without a GPU.
//
// A handle is a piece of the memfd, a reservation is PROT_NONE memory, cuMemMap is mmap(MAP_FIXED | MAP_SHARED) and
// cuMemSetAccess is mprotect: the MMU itself catches access to holes and to memory without access rights. An exported
// handle is the memfd opened once more, whose position tells piece and size, so that another process's stand-in can map
// it; unlike the driver it does not keep the memory when that process has freed it. Signatures,
// structs and status codes are those of cuda.h 13.0. `standin` and the functions `standin_...` are for tests.

#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))

typedef int CUresult;
typedef uint64_t u64;

#define STATUSES(X)                                                                                                    \
    X(CUDA_SUCCESS, 0)                                                                                                 \
    X(CUDA_ERROR_INVALID_VALUE, 1)                                                                                     \
    X(CUDA_ERROR_OUT_OF_MEMORY, 2)                                                                                     \
    X(CUDA_ERROR_NOT_INITIALIZED, 3)                                                                                   \
    X(CUDA_ERROR_INVALID_DEVICE, 101)                                                                                  \
    X(CUDA_ERROR_INVALID_CONTEXT, 201)                                                                                 \
    X(CUDA_ERROR_ALREADY_MAPPED, 208)                                                                                  \
    X(CUDA_ERROR_INVALID_HANDLE, 400)                                                                                  \
    X(CUDA_ERROR_NOT_FOUND, 500)                                                                                       \
    X(CUDA_ERROR_NOT_READY, 600)                                                                                       \
    X(CUDA_ERROR_ILLEGAL_ADDRESS, 700)                                                                                 \
    X(CUDA_ERROR_CONTEXT_IS_DESTROYED, 709)                                                                            \
    X(CUDA_ERROR_NOT_SUPPORTED, 801)
#define AS_ENUM(name, value) name = value,
enum { STATUSES(AS_ENUM) };

// The ABI of cuda.h.
enum { PINNED = 1, ON_DEVICE = 1, POSIX_FD = 1, READ = 1, READ_WRITE = 3, NON_BLOCKING = 1, DISABLE_TIMING = 2, DEVICE_POINTER = 3 };
struct location { int type, id; };
struct allocation_properties {
    int type, requested_handle_types;
    struct location location;
    void *win32_metadata;
    struct { unsigned char compression, rdma; unsigned short usage; unsigned char reserved[4]; } flags;
};
struct access { struct location location; int flags; };
_Static_assert(sizeof(struct allocation_properties) == 32 && sizeof(struct access) == 12, "not the ABI of cuda.h");

// ---- state: one device ----

// Settings and counters, shared with Python (`_Controls` in stand_in_driver.py).
API struct {
    int64_t capacity_bytes, granularity_bytes, granularity_status, refuse_run_unmap;
    int64_t fail_at, fail_status;  // call number `fail_at`, from 1, of those that `fails` counts
    double fail_rate, slow_rate;
    int64_t num_handles, num_reservations, num_mappings, num_events, num_contexts;  // of the contexts, one is torch's
    int64_t num_running, num_calls, num_violations, num_set_current;
    int64_t num_pinned, num_streams, num_copies;  // of the streams, those that were created
    u64 used_bytes;
} standin;

struct handle {
    u64 size, offset;
    int64_t num_mappings;
    int fd;  // of the memory: `memfd`, or another process's
    bool held, exportable, imported, shared;  // shared: other handles may be of the same memory
};
struct reservation { u64 address, size; };
struct mapping { u64 address, size, handle; int access; };  // the handle's index
struct event { u64 stream, moment; double when_ms; bool timed, alive; };
struct stream { u64 finished; bool alive; };  // all work up to this moment is done
struct step { u64 stream, moment, num_addresses, *addresses; };
struct allocation { u64 address, size; };
struct copy { u64 stream, moment, target, source, size; };  // done when its stream is finished up to the moment

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static bool initialised;
static int memfd;
static u64 epoch, next_offset, now, random_state, context_number;
static _Thread_local u64 current_context, current_epoch;

#define ARRAY(type, name) static type *name; static size_t num_##name, room_##name
#define GROW(name)                                                                                                     \
    do {                                                                                                               \
        if (num_##name == room_##name) {                                                                               \
            room_##name = room_##name ? 2 * room_##name : 64;                                                          \
            name = realloc(name, room_##name * sizeof *name);                                                          \
            if (!name) abort();                                                                                        \
        }                                                                                                              \
        num_##name++;                                                                                                  \
    } while (0)
ARRAY(struct handle, handles);
ARRAY(struct reservation, reservations);
ARRAY(struct mapping, mappings);  // sorted by address
ARRAY(struct event, events);
ARRAY(struct stream, streams);  // the first is the legacy default stream
ARRAY(struct step, steps);      // the oldest first
ARRAY(struct allocation, pinned);  // of the host
ARRAY(struct copy, copies);        // the oldest first
ARRAY(const char *, calls);

static char violations[64][128];

// Opaque values: kind, epoch and index, so that one of another kind, or from before a reset, is never taken for valid.
enum { HANDLE = 1, EVENT, STREAM, CONTEXT };
static u64 opaque(u64 kind, u64 index) { return kind << 56 | epoch << 32 | (index + 1); }
static u64 index_of(u64 kind, u64 value, u64 count) {  // `count` when there is no such thing
    u64 index = (value & 0xffffffff) - 1;
    return value == opaque(kind, index) && index < count ? index : count;
}

__attribute__((format(printf, 1, 2))) static void violation(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    int64_t number = standin.num_violations++;
    if (number < 64) vsnprintf(violations[number], sizeof violations[number], format, arguments);
    va_end(arguments);
}

static double chance(void) {  // xorshift64*, in [0, 1)
    random_state ^= random_state >> 12, random_state ^= random_state << 25, random_state ^= random_state >> 27;
    return (double)(random_state * 0x2545f4914f6cdd1d >> 11) / 0x1p53;
}

static bool fails(const char *name) {
    GROW(calls);
    calls[num_calls - 1] = name;
    standin.num_calls = (int64_t)num_calls;
    if (standin.slow_rate > 0 && chance() < standin.slow_rate) nanosleep(&(struct timespec){0, 1000000}, NULL);
    return standin.num_calls == standin.fail_at || (standin.fail_rate > 0 && chance() < standin.fail_rate);
}

// ---- for tests ----

// What earlier tests left over stays where it is: threads of theirs may still touch it.
static void reset(u64 capacity_bytes) {
    if (epoch++) close(memfd);
    memfd = memfd_create("stand-in-cuda", MFD_CLOEXEC);
    if (memfd < 0 || ftruncate(memfd, 1L << 46)) abort();  // sparse: offsets are never used twice
    for (size_t i = 0; i < num_steps; i++) free(steps[i].addresses);
    num_handles = num_reservations = num_mappings = num_events = num_steps = num_calls = num_streams = 0;
    num_pinned = num_copies = 0;
    next_offset = now = 0;
    random_state = 88172645463325252;
    initialised = false;
    memset(&standin, 0, sizeof standin);
    standin.capacity_bytes = (int64_t)capacity_bytes;
    standin.granularity_bytes = 2 << 20;
    standin.fail_at = -1;
    standin.fail_status = CUDA_ERROR_ILLEGAL_ADDRESS;
    standin.num_contexts = 1;
    GROW(streams);
    streams[0] = (struct stream){0, true};
}

__attribute__((constructor)) static void start(void) { reset((u64)1 << 30); }

static void unlock(pthread_mutex_t **held) { pthread_mutex_unlock(*held); }
#define LOCK                                                                                                           \
    __attribute__((cleanup(unlock))) pthread_mutex_t *held = &mutex;                                                   \
    pthread_mutex_lock(held)

API void standin_reset(u64 capacity_bytes) { LOCK; reset(capacity_bytes); }
API void standin_clear_calls(void) { LOCK; num_calls = 0; standin.num_calls = 0; }
API const char *standin_call(size_t i) { LOCK; return i < num_calls ? calls[i] : NULL; }
API const char *standin_violation(size_t i) {
    LOCK;
    return i < 64 && (int64_t)i < standin.num_violations ? violations[i] : NULL;
}

API int standin_is_reserved(u64 address) {
    LOCK;
    for (size_t i = 0; i < num_reservations; i++)
        if (address - reservations[i].address < reservations[i].size) return 1;
    return 0;
}

static size_t stream_index(u64 stream) {  // 0 and CU_STREAM_LEGACY are the default stream
    size_t index = stream <= 1 ? 0 : index_of(STREAM, stream, num_streams);
    return index < num_streams && streams[index].alive ? index : num_streams;
}

// The first mapping that ends behind the address.
static size_t mapping_index(u64 address) {
    size_t low = 0, high = num_mappings;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (mappings[middle].address + mappings[middle].size > address) high = middle;
        else low = middle + 1;
    }
    return low;
}

static bool is_accessible(u64 address) {
    size_t i = mapping_index(address);
    return i < num_mappings && mappings[i].address <= address && mappings[i].access;
}

static void drop_steps(size_t stream, u64 moment) {
    size_t kept = 0;
    for (size_t i = 0; i < num_steps; i++) {
        if (steps[i].stream == stream && steps[i].moment <= moment) free(steps[i].addresses);
        else steps[kept++] = steps[i];
    }
    standin.num_running = (int64_t)(num_steps = kept);
}

static void finish(size_t stream, u64 moment) {
    if (streams[stream].finished < moment) streams[stream].finished = moment;
    drop_steps(stream, moment);
    size_t kept = 0;
    for (size_t i = 0; i < num_copies; i++) {
        struct copy copy = copies[i];
        if (copy.stream == stream && copy.moment <= moment) memmove((void *)copy.target, (void *)copy.source, copy.size);
        else copies[kept++] = copy;
    }
    standin.num_copies = (int64_t)(num_copies = kept);
}

// Forget unfinished copies whose target, or source, is in the range; whether there were any.
static bool drop_copies(u64 address, u64 size, bool sources) {
    size_t kept = 0, before = num_copies;
    for (size_t i = 0; i < num_copies; i++) {
        u64 at = sources ? copies[i].source : copies[i].target;
        if (!(at < address + size && address < at + copies[i].size)) copies[kept++] = copies[i];
    }
    standin.num_copies = (int64_t)(num_copies = kept);
    return kept < before;
}

API void standin_launch(const u64 *addresses, size_t num_addresses, u64 stream) {
    LOCK;
    size_t index = stream_index(stream), num_holes = 0;
    u64 first = UINT64_MAX;
    if (index == num_streams) return violation("a step is launched on stream %#lx, which does not exist", stream);
    for (size_t i = 0; i < num_addresses; i++) {
        if (is_accessible(addresses[i])) continue;
        num_holes++;
        if (addresses[i] < first) first = addresses[i];
    }
    if (num_holes) violation("a step reads %zu pages that are not mapped, %#lx first", num_holes, first);
    GROW(steps);
    u64 *copy = malloc(num_addresses * sizeof *copy + 1);
    if (!copy) abort();
    if (num_addresses) memcpy(copy, addresses, num_addresses * sizeof *copy);
    steps[num_steps - 1] = (struct step){index, ++now, num_addresses, copy};
    standin.num_running = (int64_t)num_steps;
}

// The oldest steps are done, whatever their streams; and on each stream all that was before its oldest step left.
API void standin_finish_work(u64 number) {
    LOCK;
    for (; number && num_steps; number--) drop_steps(steps[0].stream, steps[0].moment);
    for (size_t stream = 0; stream < num_streams; stream++) {
        u64 moment = now;
        for (size_t i = num_steps; i-- > 0;)
            if (steps[i].stream == stream) moment = steps[i].moment - 1;
        finish(stream, moment);
    }
}

// ---- the driver ----

#define ENTER                                                                                                          \
    LOCK;                                                                                                              \
    if (!initialised) return CUDA_ERROR_NOT_INITIALIZED
#define COUNTED(name)                                                                                                  \
    ENTER;                                                                                                             \
    if (fails(name)) return (CUresult)standin.fail_status
#define CHECK(condition, status)                                                                                       \
    if (!(condition)) return status
#define CHECK_DEVICE(device) CHECK((device) == 0, CUDA_ERROR_INVALID_DEVICE)
#define CHECK_CONTEXT                                                                                                  \
    CHECK(current_context && current_epoch == epoch, CUDA_ERROR_INVALID_CONTEXT);                                      \
    CHECK(is_live(current_context), CUDA_ERROR_CONTEXT_IS_DESTROYED)

static bool is_live(u64 context) { return standin.num_contexts && context == opaque(CONTEXT, context_number); }

API CUresult cuInit(unsigned flags) {
    LOCK;
    CHECK(!flags, CUDA_ERROR_INVALID_VALUE);
    initialised = true;
    return CUDA_SUCCESS;
}

API CUresult cuDriverGetVersion(int *version) { return *version = 13000, CUDA_SUCCESS; }

API CUresult cuDeviceGetCount(int *count) { ENTER; return *count = 1, CUDA_SUCCESS; }

API CUresult cuDeviceGet(int *device, int ordinal) {
    ENTER;
    CHECK_DEVICE(ordinal);
    return *device = 0, CUDA_SUCCESS;
}

API CUresult cuDeviceGetAttribute(int *value, int attribute, int device) {
    ENTER;
    CHECK_DEVICE(device);
    switch (attribute) {
    case 16: *value = 132; break;  // multiprocessors
    case 41: case 102: case 103: *value = 1; break;  // unified addressing, virtual memory management, POSIX_FD handles
    case 75: *value = 9; break;  // compute capability 9.0
    case 76: *value = 0; break;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxRetain(u64 *context, int device) {
    ENTER;
    CHECK_DEVICE(device);
    if (!standin.num_contexts++) context_number++;
    *context = opaque(CONTEXT, context_number);
    return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxRelease_v2(int device) {
    ENTER;
    CHECK_DEVICE(device);
    CHECK(standin.num_contexts, CUDA_ERROR_INVALID_CONTEXT);
    if (!--standin.num_contexts) violation("the primary context was destroyed");
    return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    ENTER;
    CHECK_DEVICE(device);
    return *flags = 0, *active = standin.num_contexts > 0, CUDA_SUCCESS;
}

API CUresult cuCtxSetCurrent(u64 context) {
    ENTER;
    CHECK(!context || is_live(context), CUDA_ERROR_INVALID_CONTEXT);
    current_context = context, current_epoch = epoch;
    standin.num_set_current++;
    return CUDA_SUCCESS;
}

API CUresult cuCtxGetCurrent(u64 *context) {
    ENTER;
    return *context = current_epoch == epoch ? current_context : 0, CUDA_SUCCESS;
}

static bool is_pinned_device_memory(const struct allocation_properties *p) {
    return p && p->type == PINNED && p->location.type == ON_DEVICE && p->location.id == 0 &&
           (p->requested_handle_types | POSIX_FD) == POSIX_FD && !p->win32_metadata && !p->flags.compression && !p->flags.rdma && !p->flags.usage;
}

API CUresult cuMemGetAllocationGranularity(size_t *bytes, const struct allocation_properties *properties, int option) {
    ENTER;
    CHECK(is_pinned_device_memory(properties) && (option == 0 || option == 1), CUDA_ERROR_INVALID_VALUE);
    *bytes = (size_t)standin.granularity_bytes;
    return (CUresult)standin.granularity_status;
}

API CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes) {
    ENTER;
    CHECK_CONTEXT;
    *total_bytes = (size_t)standin.capacity_bytes, *free_bytes = *total_bytes - standin.used_bytes;
    return CUDA_SUCCESS;
}

static bool is_whole(u64 value) { return value % (u64)standin.granularity_bytes == 0; }

static void *hole(u64 address, u64 size) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (address ? MAP_FIXED : 0);
    return mmap((void *)address, size, PROT_NONE, flags, -1, 0);
}

// A hole behind every range: a read beyond its end is a fault, and no two ranges are neighbours.
static u64 guard_bytes(void) { return (u64)standin.granularity_bytes; }

API CUresult cuMemAddressReserve(u64 *address, size_t size, size_t alignment, u64 hint, u64 flags) {
    (void)hint;
    COUNTED("cuMemAddressReserve");
    CHECK(size && is_whole(size) && !(alignment & (alignment - 1)) && !flags, CUDA_ERROR_INVALID_VALUE);
    if (alignment < (u64)standin.granularity_bytes) alignment = (u64)standin.granularity_bytes;
    u64 whole = size + guard_bytes();
    CHECK(whole + alignment > size, CUDA_ERROR_OUT_OF_MEMORY);
    char *start = hole(0, whole + alignment);
    CHECK(start != MAP_FAILED, CUDA_ERROR_OUT_OF_MEMORY);
    u64 before = -(u64)start % alignment;
    if (before) munmap(start, before);
    munmap(start + before + whole, alignment - before);
    GROW(reservations);
    reservations[num_reservations - 1] = (struct reservation){*address = (u64)start + before, size};
    standin.num_reservations = (int64_t)num_reservations;
    return CUDA_SUCCESS;
}

API CUresult cuMemAddressFree(u64 address, size_t size) {
    COUNTED("cuMemAddressFree");
    size_t i = 0;
    while (i < num_reservations && reservations[i].address != address) i++;
    CHECK(i < num_reservations && reservations[i].size == size, CUDA_ERROR_INVALID_VALUE);
    size_t next = mapping_index(address);
    CHECK(next == num_mappings || mappings[next].address >= address + size, CUDA_ERROR_INVALID_VALUE);
    munmap((void *)address, size + guard_bytes());
    reservations[i] = reservations[--num_reservations];
    standin.num_reservations = (int64_t)num_reservations;
    return CUDA_SUCCESS;
}

static u64 new_handle(struct handle handle) {
    GROW(handles);
    handle.held = true;
    handles[num_handles - 1] = handle;
    standin.num_handles++;
    return opaque(HANDLE, num_handles - 1);
}

API CUresult cuMemCreate(u64 *handle, size_t size, const struct allocation_properties *properties, u64 flags) {
    COUNTED("cuMemCreate");
    CHECK(size && is_whole(size) && is_pinned_device_memory(properties) && !flags, CUDA_ERROR_INVALID_VALUE);
    CHECK(size <= (u64)standin.capacity_bytes - standin.used_bytes, CUDA_ERROR_OUT_OF_MEMORY);
    *handle = new_handle((struct handle){size, next_offset, .fd = memfd, .exportable = properties->requested_handle_types});
    next_offset += size, standin.used_bytes += size;
    return CUDA_SUCCESS;
}

static bool is_used(const struct handle *handle) { return handle->held || handle->num_mappings; }

// Memory lives as long as a handle of it is held or it is mapped anywhere.
static void free_if_unused(struct handle *handle) {
    if (is_used(handle)) return;
    if (handle->fd != memfd) {
        close(handle->fd);
        return;
    }
    for (size_t i = 0; handle->shared && i < num_handles; i++)
        if (handles[i].fd == memfd && handles[i].offset == handle->offset && is_used(&handles[i])) return;
    fallocate(memfd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)handle->offset, (off_t)handle->size);
    standin.used_bytes -= handle->size;
}

static struct handle *find_handle(u64 value) {
    u64 index = index_of(HANDLE, value, num_handles);
    return index < num_handles && handles[index].held ? &handles[index] : NULL;
}

API CUresult cuMemRelease(u64 value) {
    COUNTED("cuMemRelease");
    struct handle *handle = find_handle(value);
    CHECK(handle, CUDA_ERROR_INVALID_HANDLE);
    // Legal, but a backend that does so to a page of its own has lost count.
    if (handle->num_mappings && !handle->imported) violation("handle %#lx was released while mapped %ld times", value, handle->num_mappings);
    handle->held = false;
    standin.num_handles--;
    free_if_unused(handle);
    return CUDA_SUCCESS;
}

enum { OFFSET_BITS = 46, SIZE_UNIT = 4096 };

API CUresult cuMemExportToShareableHandle(void *shared, u64 value, int type, u64 flags) {
    COUNTED("cuMemExportToShareableHandle");
    struct handle *handle = find_handle(value);
    CHECK(handle && handle->exportable && type == POSIX_FD && !flags, CUDA_ERROR_INVALID_VALUE);
    char path[32];
    snprintf(path, sizeof path, "/proc/self/fd/%d", handle->fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    CHECK(fd >= 0, CUDA_ERROR_OUT_OF_MEMORY);
    lseek(fd, (off_t)(handle->size / SIZE_UNIT << OFFSET_BITS | handle->offset), SEEK_SET);
    handle->shared = true;
    return *(int *)shared = fd, CUDA_SUCCESS;
}

// The descriptor stays the caller's.
API CUresult cuMemImportFromShareableHandle(u64 *handle, void *shared, int type) {
    COUNTED("cuMemImportFromShareableHandle");
    int fd = (int)(intptr_t)shared;
    off_t position = type == POSIX_FD ? lseek(fd, 0, SEEK_CUR) : -1;
    struct stat here, there;
    CHECK(position > 0 && !fstat(memfd, &here) && !fstat(fd, &there), CUDA_ERROR_INVALID_VALUE);
    u64 size = ((u64)position >> OFFSET_BITS) * SIZE_UNIT, offset = (u64)position & (((u64)1 << OFFSET_BITS) - 1);
    CHECK(size && here.st_dev == there.st_dev, CUDA_ERROR_INVALID_VALUE);
    fd = here.st_ino == there.st_ino ? memfd : fcntl(fd, F_DUPFD_CLOEXEC, 0);
    CHECK(fd >= 0, CUDA_ERROR_OUT_OF_MEMORY);
    *handle = new_handle((struct handle){size, offset, .fd = fd, .imported = true, .shared = true});
    return CUDA_SUCCESS;
}

API CUresult cuMemMap(u64 address, size_t size, size_t offset, u64 value, u64 flags) {
    COUNTED("cuMemMap");
    struct handle *handle = find_handle(value);
    CHECK(handle, CUDA_ERROR_INVALID_HANDLE);
    size_t r = 0;
    while (r < num_reservations && address - reservations[r].address >= reservations[r].size) r++;
    CHECK(r < num_reservations, CUDA_ERROR_INVALID_VALUE);
    CHECK(size <= reservations[r].address + reservations[r].size - address, CUDA_ERROR_INVALID_VALUE);
    CHECK(!offset && !flags && size == handle->size && is_whole(address), CUDA_ERROR_INVALID_VALUE);
    size_t i = mapping_index(address);
    CHECK(i == num_mappings || mappings[i].address >= address + size, CUDA_ERROR_ALREADY_MAPPED);
    // Fails beyond the system's limit on mappings (vm.max_map_count), as the driver does beyond its own.
    void *at = mmap((void *)address, size, PROT_NONE, MAP_SHARED | MAP_FIXED, handle->fd, (off_t)handle->offset);
    CHECK(at != MAP_FAILED, CUDA_ERROR_OUT_OF_MEMORY);
    GROW(mappings);
    memmove(mappings + i + 1, mappings + i, (num_mappings - 1 - i) * sizeof *mappings);
    mappings[i] = (struct mapping){address, size, (u64)(handle - handles), 0};
    handle->num_mappings++;
    standin.num_mappings = (int64_t)num_mappings;
    return CUDA_SUCCESS;
}

// How many mappings, from number `first` on, cover the range exactly; 0 when none do.
static size_t num_whole_mappings(size_t first, u64 address, u64 size) {
    u64 end = address + size;
    size_t i = first;
    while (i < num_mappings && mappings[i].address == address && address < end) address += mappings[i++].size;
    return address == end ? i - first : 0;
}

API CUresult cuMemSetAccess(u64 address, size_t size, const struct access *access, size_t count) {
    COUNTED("cuMemSetAccess");
    size_t first = mapping_index(address), number = num_whole_mappings(first, address, size);
    CHECK(number && count == 1 && access, CUDA_ERROR_INVALID_VALUE);
    CHECK(access->flags == READ || access->flags == READ_WRITE, CUDA_ERROR_INVALID_VALUE);
    CHECK(access->location.type == ON_DEVICE && access->location.id == 0, CUDA_ERROR_INVALID_VALUE);
    int protection = access->flags == READ ? PROT_READ : PROT_READ | PROT_WRITE;
    CHECK(!mprotect((void *)address, size, protection), CUDA_ERROR_OUT_OF_MEMORY);
    for (size_t i = first; i < first + number; i++) mappings[i].access = access->flags;
    return CUDA_SUCCESS;
}

static bool is_being_read(u64 address, u64 size) {
    for (size_t s = 0; s < num_steps; s++)
        for (u64 i = 0; i < steps[s].num_addresses; i++)
            if (steps[s].addresses[i] - address < size) return true;
    return false;
}

API CUresult cuMemUnmap(u64 address, size_t size) {
    COUNTED("cuMemUnmap");
    size_t first = mapping_index(address), number = num_whole_mappings(first, address, size);
    CHECK(number == 1 || (number && !standin.refuse_run_unmap), CUDA_ERROR_INVALID_VALUE);
    CHECK(hole(address, size) != MAP_FAILED, CUDA_ERROR_OUT_OF_MEMORY);
    for (size_t i = first; i < first + number; i++) {
        if (is_being_read(mappings[i].address, mappings[i].size))
            violation("%#lx was unmapped under a running step", mappings[i].address);
        struct handle *handle = &handles[mappings[i].handle];
        handle->num_mappings--;
        free_if_unused(handle);
    }
    if (drop_copies(address, size, false)) violation("%#lx was unmapped under a running copy", address);
    memmove(mappings + first, mappings + first + number, (num_mappings - first - number) * sizeof *mappings);
    standin.num_mappings = (int64_t)(num_mappings -= number);
    return CUDA_SUCCESS;
}

API CUresult cuPointerGetAttribute(void *data, int attribute, u64 address) {
    ENTER;
    CHECK(attribute == DEVICE_POINTER && is_accessible(address), CUDA_ERROR_INVALID_VALUE);
    return *(u64 *)data = address, CUDA_SUCCESS;
}

API CUresult cuMemHostAlloc(void **address, size_t size, unsigned flags) {
    COUNTED("cuMemHostAlloc");
    CHECK_CONTEXT;
    CHECK(size && !flags, CUDA_ERROR_INVALID_VALUE);
    *address = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(*address != MAP_FAILED, CUDA_ERROR_OUT_OF_MEMORY);
    GROW(pinned);
    pinned[num_pinned - 1] = (struct allocation){(u64)*address, size};
    standin.num_pinned = (int64_t)num_pinned;
    return CUDA_SUCCESS;
}

API CUresult cuMemFreeHost(void *address) {
    COUNTED("cuMemFreeHost");
    CHECK_CONTEXT;
    size_t i = 0;
    while (i < num_pinned && pinned[i].address != (u64)address) i++;
    CHECK(i < num_pinned, CUDA_ERROR_INVALID_VALUE);
    if (drop_copies((u64)address, pinned[i].size, true)) violation("%p was freed under a running copy", address);
    munmap(address, pinned[i].size);
    pinned[i] = pinned[--num_pinned];
    standin.num_pinned = (int64_t)num_pinned;
    return CUDA_SUCCESS;
}

static bool is_all_writable(u64 address, u64 end) {
    for (size_t i = mapping_index(address); address < end; i++) {
        if (i == num_mappings || mappings[i].address > address || mappings[i].access != READ_WRITE) return false;
        address = mappings[i].address + mappings[i].size;
    }
    return true;
}

// Like a copy in hardware it reads its source some time before the stream is finished: as late as possible.
API CUresult cuMemcpyHtoDAsync_v2(u64 target, const void *source, size_t size, u64 stream) {
    COUNTED("cuMemcpyHtoDAsync");
    CHECK_CONTEXT;
    size_t index = stream_index(stream);
    CHECK(index < num_streams, CUDA_ERROR_INVALID_HANDLE);
    CHECK(is_all_writable(target, target + size), CUDA_ERROR_INVALID_VALUE);
    u64 from = (u64)source;
    size_t i = 0;
    while (i < num_pinned && !(pinned[i].address <= from && from + size <= pinned[i].address + pinned[i].size)) i++;
    if (i == num_pinned) violation("%zu bytes are copied from %#lx, which is not pinned", size, from);
    GROW(copies);
    copies[num_copies - 1] = (struct copy){index, ++now, target, from, size};
    standin.num_copies = (int64_t)num_copies;
    return CUDA_SUCCESS;
}

API CUresult cuStreamCreate(u64 *stream, unsigned flags) {
    COUNTED("cuStreamCreate");
    CHECK_CONTEXT;
    CHECK(flags == NON_BLOCKING, CUDA_ERROR_NOT_SUPPORTED);  // no stream here waits for the default stream
    GROW(streams);
    standin.num_streams++;
    streams[num_streams - 1] = (struct stream){now, true};
    return *stream = opaque(STREAM, num_streams - 1), CUDA_SUCCESS;
}

API CUresult cuStreamDestroy_v2(u64 stream) {  // its work goes on
    COUNTED("cuStreamDestroy");
    CHECK_CONTEXT;
    size_t index = stream_index(stream);
    CHECK(index && index < num_streams, CUDA_ERROR_INVALID_HANDLE);
    streams[index].alive = false;
    standin.num_streams--;
    return CUDA_SUCCESS;
}

// Waiting takes no time: what is waited for is done.
API CUresult cuStreamSynchronize(u64 stream) {
    ENTER;
    size_t index = stream_index(stream);
    if (index && index < num_streams && fails("cuStreamSynchronize")) return (CUresult)standin.fail_status;
    CHECK_CONTEXT;
    CHECK(index < num_streams, CUDA_ERROR_INVALID_HANDLE);
    finish(index, now);
    return CUDA_SUCCESS;
}

static struct event *find_event(u64 value) {
    u64 index = index_of(EVENT, value, num_events);
    return index < num_events && events[index].alive ? &events[index] : NULL;
}

static bool has_passed(const struct event *event) { return event->moment <= streams[event->stream].finished; }

API CUresult cuEventCreate(u64 *event, unsigned flags) {
    COUNTED("cuEventCreate");
    CHECK_CONTEXT;
    CHECK(flags < 8, CUDA_ERROR_INVALID_VALUE);
    GROW(events);
    events[num_events - 1] = (struct event){.timed = !(flags & DISABLE_TIMING), .alive = true};
    standin.num_events++;
    return *event = opaque(EVENT, num_events - 1), CUDA_SUCCESS;
}

API CUresult cuEventRecord(u64 value, u64 stream) {
    COUNTED("cuEventRecord");
    CHECK_CONTEXT;
    struct event *event = find_event(value);
    size_t index = stream_index(stream);
    CHECK(event && index < num_streams, CUDA_ERROR_INVALID_HANDLE);
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    event->stream = index, event->moment = ++now;
    event->when_ms = (double)time.tv_sec * 1e3 + (double)time.tv_nsec * 1e-6;
    return CUDA_SUCCESS;
}

API CUresult cuEventQuery(u64 value) {
    ENTER;
    struct event *event = find_event(value);
    CHECK(event, CUDA_ERROR_INVALID_HANDLE);
    return has_passed(event) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

API CUresult cuEventSynchronize(u64 value) {
    ENTER;
    struct event *event = find_event(value);
    if (event && event->stream && fails("cuEventSynchronize")) return (CUresult)standin.fail_status;
    CHECK_CONTEXT;
    CHECK(event, CUDA_ERROR_INVALID_HANDLE);
    finish(event->stream, event->moment);
    return CUDA_SUCCESS;
}

API CUresult cuEventElapsedTime_v2(float *ms, u64 start_value, u64 end_value) {
    ENTER;
    CHECK_CONTEXT;
    struct event *begin = find_event(start_value), *end = find_event(end_value);
    CHECK(begin && end && begin->timed && end->timed && begin->moment && end->moment, CUDA_ERROR_INVALID_HANDLE);
    CHECK(has_passed(begin) && has_passed(end), CUDA_ERROR_NOT_READY);
    return *ms = (float)(end->when_ms - begin->when_ms), CUDA_SUCCESS;  // by the host's clock, between the recordings
}

API CUresult cuEventDestroy_v2(u64 value) {
    ENTER;
    CHECK_CONTEXT;
    struct event *event = find_event(value);
    CHECK(event, CUDA_ERROR_INVALID_HANDLE);
    event->alive = false;
    standin.num_events--;
    return CUDA_SUCCESS;
}

#define AS_CASE(name, value) case value: *text = #name; return CUDA_SUCCESS;
API CUresult cuGetErrorName(CUresult status, const char **text) {
    switch (status) { STATUSES(AS_CASE) }
    return *text = NULL, CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuGetErrorString(CUresult status, const char **text) { return cuGetErrorName(status, text); }

API CUresult cuGetProcAddress_v2(const char *name, void **function, int version, u64 flags, int *found) {
    (void)version, (void)flags;
    static const struct { const char *name; void *function; } table[] = {
#define PLAIN(name) {#name, name}
#define V2(name) {#name, name##_v2}
        PLAIN(cuInit), PLAIN(cuDriverGetVersion), PLAIN(cuDeviceGetCount), PLAIN(cuDeviceGet),
        PLAIN(cuDeviceGetAttribute), PLAIN(cuDevicePrimaryCtxRetain), V2(cuDevicePrimaryCtxRelease),
        PLAIN(cuDevicePrimaryCtxGetState), PLAIN(cuCtxSetCurrent), PLAIN(cuCtxGetCurrent),
        PLAIN(cuMemGetAllocationGranularity), V2(cuMemGetInfo), PLAIN(cuMemAddressReserve), PLAIN(cuMemAddressFree),
        PLAIN(cuMemCreate), PLAIN(cuMemRelease), PLAIN(cuMemMap), PLAIN(cuMemSetAccess), PLAIN(cuMemUnmap),
        PLAIN(cuMemExportToShareableHandle), PLAIN(cuMemImportFromShareableHandle), PLAIN(cuMemHostAlloc), PLAIN(cuMemFreeHost), V2(cuMemcpyHtoDAsync),
        PLAIN(cuPointerGetAttribute), PLAIN(cuStreamCreate), V2(cuStreamDestroy), PLAIN(cuStreamSynchronize),
        PLAIN(cuEventCreate), PLAIN(cuEventRecord), PLAIN(cuEventQuery), PLAIN(cuEventSynchronize),
        V2(cuEventElapsedTime), V2(cuEventDestroy), PLAIN(cuGetErrorName), PLAIN(cuGetErrorString),
        V2(cuGetProcAddress),
    };
    *function = NULL;
    for (size_t i = 0; !*function && i < sizeof table / sizeof *table; i++)
        if (!strcmp(name, table[i].name)) *function = table[i].function;
    if (found) *found = *function ? 0 : 1;
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

API CUresult cuGetProcAddress(const char *name, void **function, int version, u64 flags) {
    return cuGetProcAddress_v2(name, function, version, flags, NULL);
}
