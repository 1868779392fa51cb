/* Interposes file system calls below one root: counts them, makes one of them fail, or records them.
 *
 * Preloaded into the campaign's process and dormant until `shim_watch` names a root. Paths elsewhere are never touched.
 * Build: cc -shared -fPIC -O1 -o shim.so shim.c -ldl -lpthread
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

/* the numbers are known to calls.py */
enum op { OPEN, CLOSE, READ, WRITE, FSYNC, RENAME, LINK, UNLINK, MKDIR, RMDIR, TRUNCATE, ALLOCATE, FLOCK, STAT, OPENDIR,
          READDIR, MARK };
enum { STICKY = 1, SHORT = 2, KILL = 4, AFTER = 8 };
enum { GO = 0, CUT = -1 };

struct control {            /* shared with processes that are forked after `shim_watch` */
    pthread_mutex_t order;  /* held around a recorded call, so that the record has the order of the calls */
    long count, target;
    int error, flags, armed;
    char hit[512];
};

struct record {
    int32_t op, pid, fd, flags;
    int64_t offset, size;
    uint32_t path, other, data;
};

static struct control *shared;
static char root[4096];
static size_t root_length;
static int trace = -1, listing = -1;
static char *names[65536]; /* what is open below the root: path by descriptor */

#define REAL(type, name, ...)                              \
    static type (*real)(__VA_ARGS__);                      \
    if (!real) real = (type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name)

static const char *below(const char *path) {
    if (!shared || !root_length || !path || strncmp(path, root, root_length)) return NULL;
    if (path[root_length] == '/') return path + root_length + 1;
    return path[root_length] ? NULL : ".";
}

static const char *named(int fd) { return shared && fd >= 0 && fd < 65536 ? names[fd] : NULL; }

static void name_it(int fd, const char *path) {
    if (fd >= 0 && fd < 65536) names[fd] = path ? strdup(path) : NULL;
}

static const char *at(int directory, const char *path, char *room, size_t size) {
    if (!path || path[0] == '/' || directory == AT_FDCWD) return below(path);
    const char *folder = named(directory);
    if (!folder) return NULL;
    if (!strcmp(folder, ".")) return path;
    snprintf(room, size, "%s/%s", folder, path);
    return room;
}

/* Count a call. Returns GO, CUT (transfer less), or the errno with which it fails. */
static int strike(enum op op, const char *path, int can_cut) {
    if (!path || !shared || !shared->armed) return GO;
    long number = __atomic_add_fetch(&shared->count, 1, __ATOMIC_SEQ_CST);
    if (listing >= 0) {
        char line[4200];
        int length = snprintf(line, sizeof line, "%d %d %s\n", (int)op, can_cut, path);
        syscall(SYS_write, listing, line, length);
    }
    int sticky = shared->flags & STICKY;
    if (number != shared->target && !(sticky && shared->target && number > shared->target)) return GO;
    if (number == shared->target) snprintf(shared->hit, sizeof shared->hit, "%d %s", (int)op, path);
    if (shared->flags & KILL) syscall(SYS_kill, getpid(), SIGKILL);
    if (shared->flags & SHORT) return can_cut ? CUT : GO;
    return shared->error;
}

static int hold(const char *path) {
    if (trace < 0 || !path) return 0;
    pthread_mutex_lock(&shared->order);
    return 1;
}

static void put(enum op op, int fd, int flags, long offset, long size, const char *path, const char *other,
                const void *data, size_t length) {
    struct record head = {op, getpid(), fd, flags, offset, size, path ? strlen(path) : 0, other ? strlen(other) : 0,
                          length};
    struct iovec parts[] = {{&head, sizeof head}, {(void *)path, head.path}, {(void *)other, head.other},
                            {(void *)data, length}};
    int saved = errno;
    syscall(SYS_writev, trace, parts, 4);
    errno = saved;
}

static int done(int held, int result) {
    if (held) pthread_mutex_unlock(&shared->order);
    return result;
}

/* A call that changes names or sizes: fail before it, fail after it took effect, or let it happen. */
#define CHANGE(op, path, other, fd, offset, size, call)                        \
    int fault = strike(op, path, 0);                                           \
    if (fault > 0 && !(shared->flags & AFTER)) { errno = fault; return -1; }   \
    int held = hold(path);                                                     \
    int result = (call);                                                       \
    if (held && result == 0) put(op, fd, 0, offset, size, path, other, NULL, 0); \
    done(held, 0);                                                             \
    if (fault > 0) { errno = fault; return -1; }                               \
    return result

/* ---- what the campaign calls ---- */

void shim_watch(const char *path, int recording) {
    if (!shared) {
        shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        pthread_mutexattr_t kind;
        pthread_mutexattr_init(&kind);
        pthread_mutexattr_setpshared(&kind, PTHREAD_PROCESS_SHARED);
        pthread_mutex_init(&shared->order, &kind);
    }
    snprintf(root, sizeof root, "%s", path);
    root_length = strlen(root);
    trace = recording;
}

void shim_arm(long target, int error, int flags) {
    shared->count = 0;
    shared->target = target;
    shared->error = error;
    shared->flags = flags;
    shared->hit[0] = 0;
    shared->armed = 1;
}

/* Write every counted call to a descriptor, a line each. */
void shim_list(int descriptor) { listing = descriptor; }

long shim_disarm(void) {
    shared->armed = 0;
    return shared->count;
}

const char *shim_hit(void) { return shared ? shared->hit : ""; }

void shim_mark(const char *text) {
    if (hold(text)) {
        put(MARK, -1, 0, 0, 0, text, NULL, NULL, 0);
        pthread_mutex_unlock(&shared->order);
    }
}

/* ---- descriptors ---- */

static int opened(int fd, const char *path, const char *full, int flags) {
    if (fd < 0 || !path) return fd;
    name_it(fd, path);
    int known = full && !strncmp(full, "/proc/self/fd/", 14) ? atoi(full + 14) : -1;
    if (trace >= 0) put(OPEN, fd, flags, known, 0, path, NULL, NULL, 0);
    return fd;
}

static const char *to_open(int directory, const char *path, char *room, size_t size) {
    if (path && !strncmp(path, "/proc/self/fd/", 14)) return named(atoi(path + 14));
    return at(directory, path, room, size);
}

#define OPENING(name, directory, type, ...)                                  \
    mode_t mode = 0;                                                         \
    if (flags & (O_CREAT | O_TMPFILE)) {                                     \
        va_list rest;                                                        \
        va_start(rest, flags);                                               \
        mode = va_arg(rest, mode_t);                                         \
        va_end(rest);                                                        \
    }                                                                        \
    char room[4096];                                                         \
    const char *inside = to_open(directory, path, room, sizeof room);        \
    int fault = strike(OPEN, inside, 0);                                     \
    if (fault > 0) { errno = fault; return -1; }                             \
    int held = hold(inside);                                                 \
    int fd = real(__VA_ARGS__, flags, mode);                                 \
    return done(held, opened(fd, inside, path, flags))

int open(const char *path, int flags, ...) {
    REAL(int, open, const char *, int, ...);
    OPENING(open, AT_FDCWD, int, path);
}
int open64(const char *path, int flags, ...) {
    REAL(int, open64, const char *, int, ...);
    OPENING(open64, AT_FDCWD, int, path);
}
int openat(int directory, const char *path, int flags, ...) {
    REAL(int, openat, int, const char *, int, ...);
    OPENING(openat, directory, int, directory, path);
}
int openat64(int directory, const char *path, int flags, ...) {
    REAL(int, openat64, int, const char *, int, ...);
    OPENING(openat64, directory, int, directory, path);
}

int close(int fd) {
    REAL(int, close, int);
    const char *path = named(fd);
    int fault = strike(CLOSE, path, 0);
    if (path) name_it(fd, NULL);
    int result = real(fd); /* the descriptor is gone, whatever close reports */
    if (fault > 0) { errno = fault; return -1; }
    return result;
}

/* ---- bytes ---- */

#define READING(fd, size, call_whole, call_cut)                   \
    int fault = strike(READ, named(fd), (size) > 1);              \
    if (fault > 0) { errno = fault; return -1; }                  \
    return fault == CUT ? (call_cut) : (call_whole)

ssize_t read(int fd, void *data, size_t size) {
    REAL(ssize_t, read, int, void *, size_t);
    READING(fd, size, real(fd, data, size), real(fd, data, size / 2));
}
ssize_t pread(int fd, void *data, size_t size, off_t offset) {
    REAL(ssize_t, pread, int, void *, size_t, off_t);
    READING(fd, size, real(fd, data, size, offset), real(fd, data, size / 2, offset));
}
ssize_t pread64(int fd, void *data, size_t size, off_t offset) {
    REAL(ssize_t, pread64, int, void *, size_t, off_t);
    READING(fd, size, real(fd, data, size, offset), real(fd, data, size / 2, offset));
}
static size_t total(const struct iovec *parts, int count) {
    size_t sum = 0;
    for (int i = 0; i < count; i++) sum += parts[i].iov_len;
    return sum;
}
static ssize_t first_half(int fd, const struct iovec *parts, int count, off_t offset) {
    int i = 0;
    while (i < count - 1 && !parts[i].iov_len) i++;
    return syscall(SYS_pread64, fd, parts[i].iov_base, (parts[i].iov_len + 1) / 2, offset);
}
ssize_t preadv64v2(int fd, const struct iovec *parts, int count, off_t offset, int flags) {
    REAL(ssize_t, preadv64v2, int, const struct iovec *, int, off_t, int);
    READING(fd, total(parts, count), real(fd, parts, count, offset, flags), first_half(fd, parts, count, offset));
}
ssize_t preadv64(int fd, const struct iovec *parts, int count, off_t offset) {
    REAL(ssize_t, preadv64, int, const struct iovec *, int, off_t);
    READING(fd, total(parts, count), real(fd, parts, count, offset), first_half(fd, parts, count, offset));
}

#define WRITING(fd, data, size, offset, call)                                        \
    const char *path = named(fd);                                                    \
    int fault = strike(WRITE, path, (size) > 1);                                     \
    if (fault > 0) { errno = fault; return -1; }                                     \
    size_t part = fault == CUT ? (size) / 2 : (size);                                \
    int held = hold(path);                                                           \
    off_t start = (offset);                                                          \
    ssize_t result = (call);                                                         \
    if (held && result > 0) put(WRITE, fd, 0, start, result, path, NULL, data, result); \
    done(held, 0);                                                                   \
    return result

ssize_t write(int fd, const void *data, size_t size) {
    REAL(ssize_t, write, int, const void *, size_t);
    if (!named(fd)) return real(fd, data, size);
    WRITING(fd, data, size, lseek(fd, 0, SEEK_CUR), real(fd, data, part));
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) {
    REAL(ssize_t, pwrite, int, const void *, size_t, off_t);
    WRITING(fd, data, size, offset, real(fd, data, part, offset));
}
ssize_t pwrite64(int fd, const void *data, size_t size, off_t offset) {
    REAL(ssize_t, pwrite64, int, const void *, size_t, off_t);
    WRITING(fd, data, size, offset, real(fd, data, part, offset));
}
/* one buffer at a time is a legal, if short, write */
ssize_t pwritev64v2(int fd, const struct iovec *parts, int count, off_t offset, int flags) {
    REAL(ssize_t, pwritev64v2, int, const struct iovec *, int, off_t, int);
    if (!named(fd) || count < 1) return real(fd, parts, count, offset, flags);
    WRITING(fd, parts[0].iov_base, parts[0].iov_len, offset, syscall(SYS_pwrite64, fd, parts[0].iov_base, part, offset));
}
ssize_t writev(int fd, const struct iovec *parts, int count) {
    REAL(ssize_t, writev, int, const struct iovec *, int);
    if (!named(fd) || count < 1) return real(fd, parts, count);
    WRITING(fd, parts[0].iov_base, parts[0].iov_len, lseek(fd, 0, SEEK_CUR),
            syscall(SYS_write, fd, parts[0].iov_base, part));
}

int fsync(int fd) {
    REAL(int, fsync, int);
    CHANGE(FSYNC, named(fd), NULL, fd, 0, 0, real(fd));
}
int fdatasync(int fd) {
    REAL(int, fdatasync, int);
    CHANGE(FSYNC, named(fd), NULL, fd, 0, 0, real(fd));
}
int ftruncate(int fd, off_t size) {
    REAL(int, ftruncate, int, off_t);
    CHANGE(TRUNCATE, named(fd), NULL, fd, 0, size, real(fd, size));
}
int ftruncate64(int fd, off_t size) {
    REAL(int, ftruncate64, int, off_t);
    CHANGE(TRUNCATE, named(fd), NULL, fd, 0, size, real(fd, size));
}
int fallocate(int fd, int mode, off_t offset, off_t size) {
    REAL(int, fallocate, int, int, off_t, off_t);
    CHANGE(ALLOCATE, named(fd), NULL, fd, offset, mode & FALLOC_FL_KEEP_SIZE ? 0 : size, real(fd, mode, offset, size));
}
int fallocate64(int fd, int mode, off_t offset, off_t size) {
    REAL(int, fallocate64, int, int, off_t, off_t);
    CHANGE(ALLOCATE, named(fd), NULL, fd, offset, mode & FALLOC_FL_KEEP_SIZE ? 0 : size, real(fd, mode, offset, size));
}
static int reserve(int fd, off_t offset, off_t size, int (*real)(int, off_t, off_t)) {
    const char *path = named(fd);
    int fault = strike(ALLOCATE, path, 0);
    if (fault > 0) return fault; /* this one returns its error */
    int held = hold(path);
    int result = real(fd, offset, size);
    if (held && result == 0) put(ALLOCATE, fd, 0, offset, size, path, NULL, NULL, 0);
    return done(held, result);
}
int posix_fallocate(int fd, off_t offset, off_t size) {
    REAL(int, posix_fallocate, int, off_t, off_t);
    return reserve(fd, offset, size, real);
}
int posix_fallocate64(int fd, off_t offset, off_t size) {
    REAL(int, posix_fallocate64, int, off_t, off_t);
    return reserve(fd, offset, size, real);
}
int flock(int fd, int operation) {
    REAL(int, flock, int, int);
    int fault = strike(FLOCK, named(fd), 0);
    if (fault > 0) { errno = fault; return -1; }
    return real(fd, operation); /* may wait: not under the recorder's lock */
}

/* ---- names ---- */

int rename(const char *from, const char *to) {
    REAL(int, rename, const char *, const char *);
    CHANGE(RENAME, below(to), below(from), -1, 0, 0, real(from, to));
}
int renameat(int a, const char *from, int b, const char *to) {
    REAL(int, renameat, int, const char *, int, const char *);
    char room[4096], other[4096];
    CHANGE(RENAME, at(b, to, room, sizeof room), at(a, from, other, sizeof other), -1, 0, 0, real(a, from, b, to));
}
int link(const char *from, const char *to) {
    REAL(int, link, const char *, const char *);
    CHANGE(LINK, below(to), below(from), -1, 0, 0, real(from, to));
}
int linkat(int a, const char *from, int b, const char *to, int flags) {
    REAL(int, linkat, int, const char *, int, const char *, int);
    char room[4096], other[4096];
    CHANGE(LINK, at(b, to, room, sizeof room), at(a, from, other, sizeof other), -1, 0, 0, real(a, from, b, to, flags));
}
int unlink(const char *path) {
    REAL(int, unlink, const char *);
    CHANGE(UNLINK, below(path), NULL, -1, 0, 0, real(path));
}
int unlinkat(int directory, const char *path, int flags) {
    REAL(int, unlinkat, int, const char *, int);
    char room[4096];
    CHANGE(flags & AT_REMOVEDIR ? RMDIR : UNLINK, at(directory, path, room, sizeof room), NULL, -1, 0, 0,
           real(directory, path, flags));
}
int rmdir(const char *path) {
    REAL(int, rmdir, const char *);
    CHANGE(RMDIR, below(path), NULL, -1, 0, 0, real(path));
}
int mkdir(const char *path, mode_t mode) {
    REAL(int, mkdir, const char *, mode_t);
    CHANGE(MKDIR, below(path), NULL, -1, 0, 0, real(path, mode));
}
int mkdirat(int directory, const char *path, mode_t mode) {
    REAL(int, mkdirat, int, const char *, mode_t);
    char room[4096];
    CHANGE(MKDIR, at(directory, path, room, sizeof room), NULL, -1, 0, 0, real(directory, path, mode));
}

/* ---- looking ---- */

#define LOOK(path, call)                                         \
    int fault = strike(STAT, path, 0);                           \
    if (fault > 0) { errno = fault; return -1; }                 \
    return (call)

int stat64(const char *path, struct stat64 *found) {
    REAL(int, stat64, const char *, struct stat64 *);
    LOOK(below(path), real(path, found));
}
int lstat64(const char *path, struct stat64 *found) {
    REAL(int, lstat64, const char *, struct stat64 *);
    LOOK(below(path), real(path, found));
}
int fstat64(int fd, struct stat64 *found) {
    REAL(int, fstat64, int, struct stat64 *);
    LOOK(named(fd), real(fd, found));
}
int fstatat64(int directory, const char *path, struct stat64 *found, int flags) {
    REAL(int, fstatat64, int, const char *, struct stat64 *, int);
    char room[4096];
    LOOK(at(directory, path, room, sizeof room), real(directory, path, found, flags));
}

DIR *opendir(const char *path) {
    REAL(DIR *, opendir, const char *);
    const char *inside = below(path);
    int fault = strike(OPENDIR, inside, 0);
    if (fault > 0) { errno = fault; return NULL; }
    DIR *folder = real(path);
    if (folder && inside) name_it(dirfd(folder), inside);
    return folder;
}
DIR *fdopendir(int fd) {
    REAL(DIR *, fdopendir, int);
    char link[32], path[4096]; /* it is a duplicate, which has no name here yet */
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    path[length < 0 ? 0 : length] = 0;
    const char *inside = below(path);
    int fault = strike(OPENDIR, inside, 0);
    if (fault > 0) { errno = fault; return NULL; }
    DIR *folder = real(fd);
    if (folder && inside) name_it(fd, inside);
    return folder;
}
struct dirent64 *readdir64(DIR *folder) {
    REAL(struct dirent64 *, readdir64, DIR *);
    int fault = strike(READDIR, named(dirfd(folder)), 0);
    if (fault > 0) { errno = fault; return NULL; }
    return real(folder);
}
int closedir(DIR *folder) {
    REAL(int, closedir, DIR *);
    if (named(dirfd(folder))) name_it(dirfd(folder), NULL);
    return real(folder);
}
