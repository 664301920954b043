/* What reaches the disk: a preloaded library that logs every change of files below a folder, and every sync.

   One record a call that succeeded, with its place in the order of all processes; disk.py makes of the log what a disk
   may hold after a loss of power. It sees what goes through the C library: no stores into mapped files, no io_uring, no
   direct system calls, nothing that stdio writes. sync_file_range promises nothing (see its manual) and is not logged.

   AREAL_DISK_ROOT   the folder, without symbolic links
   AREAL_DISK_LOG    where the logs go, one a process; its file `sequence` holds the number of the last record
   AREAL_CLOCK       a file with nanoseconds, a native int64, by which the wall clock is wrong; it may change any time
*/
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { WRITE = 1, TRUNCATE, LINK, UNLINK, RENAME, SYNC, SYNC_ALL };
enum { FILE_KIND, FOLDER_KIND };
#define MAGIC 0x4b534944u

struct record {
    uint32_t magic, op;
    uint64_t sequence, start; /* start: what was logged before it had been done when a sync began */
    uint64_t inode, a, b;     /* WRITE offset, synced; TRUNCATE size; LINK folder, kind; UNLINK folder; RENAME folders */
    uint64_t length;          /* of what follows: data, a name, or two names with a NUL between */
};

static char root[PATH_MAX], log_folder[PATH_MAX];
static size_t root_length;
static _Atomic uint64_t *sequence;
static volatile int64_t *clock_error;

#define NEXT(name)                                                                                                     \
    ({                                                                                                                 \
        static __typeof__(&name) found;                                                                                \
        found ? found : (found = (__typeof__(&name))dlsym(RTLD_NEXT, #name));                                          \
    })

static void *map(const char *path, int protection) {
    int fd = syscall(SYS_openat, AT_FDCWD, path, (protection & PROT_WRITE ? O_RDWR : O_RDONLY) | O_CLOEXEC, 0);
    if (fd < 0) return NULL;
    void *mapped = mmap(NULL, sizeof(uint64_t), protection, MAP_SHARED, fd, 0);
    syscall(SYS_close, fd);
    return mapped == MAP_FAILED ? NULL : mapped;
}

__attribute__((constructor)) static void begin(void) {
    const char *folder = getenv("AREAL_DISK_ROOT"), *logs = getenv("AREAL_DISK_LOG"), *clock = getenv("AREAL_CLOCK");
    if (clock) clock_error = map(clock, PROT_READ);
    if (!folder || !logs) return;
    root_length = snprintf(root, sizeof root, "%s", folder);
    snprintf(log_folder, sizeof log_folder, "%s", logs);
    char path[PATH_MAX + 16];
    snprintf(path, sizeof path, "%s/sequence", logs);
    sequence = map(path, PROT_READ | PROT_WRITE);
}

static int below(const char *path) {
    return !strncmp(path, root, root_length) && (path[root_length] == '/' || !path[root_length]);
}

/* One append a record: of threads and processes, none gets between. */
static void put(uint32_t op, uint64_t start, uint64_t inode, uint64_t a, uint64_t b, const struct iovec *parts, int count,
                size_t length) {
    int saved = errno;
    char path[PATH_MAX + 32];
    snprintf(path, sizeof path, "%s/%d.log", log_folder, (int)getpid());
    struct record head = {MAGIC, op, atomic_fetch_add(sequence, 1) + 1, start, inode, a, b, length};
    struct iovec all[count + 1];
    all[0] = (struct iovec){&head, sizeof head};
    int used = 1;
    for (size_t left = length; used <= count && left; used++) {
        all[used] = parts[used - 1];
        if (all[used].iov_len > left) all[used].iov_len = left;
        left -= all[used].iov_len;
    }
    int fd = syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
    if (fd < 0 || syscall(SYS_writev, fd, all, used) != (ssize_t)(sizeof head + length)) {
        static const char text[] = "power.c: the log can't be written\n";
        syscall(SYS_write, 2, text, sizeof text - 1);
        _exit(97);
    }
    syscall(SYS_close, fd);
    errno = saved;
}

static void put_bytes(uint32_t op, uint64_t inode, uint64_t a, uint64_t b, const void *data, size_t length) {
    struct iovec part = {(void *)data, length};
    put(op, 0, inode, a, b, &part, 1, length);
}

/* Whether a descriptor is of a file or folder below the root. */
static int tracked(int fd, struct stat *found) {
    if (!sequence) return 0;
    int saved = errno, is = 0;
    char link[32], path[PATH_MAX];
    if (!fstat(fd, found) && (S_ISREG(found->st_mode) || S_ISDIR(found->st_mode))) {
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        ssize_t length = readlink(link, path, sizeof path - 1);
        if (length > 0) {
            path[length] = 0;
            is = below(path);
        }
    }
    errno = saved;
    return is;
}

/* The folder (its inode) and the last name of a path; 0 unless it is below the root. */
static int place(int at, const char *path, uint64_t *folder, char *name) {
    if (!sequence || !path || (path[0] == '/' && !below(path))) return 0;
    int saved = errno, found = 0;
    char joined[2 * PATH_MAX], link[32], real[PATH_MAX];
    struct stat status;
    size_t used = 0;
    if (path[0] != '/') {
        snprintf(link, sizeof link, "/proc/self/fd/%d", at);
        ssize_t length = readlink(at == AT_FDCWD ? "/proc/self/cwd" : link, joined, PATH_MAX - 1);
        if (length <= 0) goto out;
        joined[length] = '/';
        used = length + 1;
    }
    snprintf(joined + used, sizeof joined - used, "%s", path);
    for (size_t end = strlen(joined); end > 1 && joined[end - 1] == '/'; end--) joined[end - 1] = 0;
    char *slash = strrchr(joined, '/');
    snprintf(name, NAME_MAX + 1, "%s", slash + 1);
    *slash = 0;
    if (realpath(joined, real) && below(real) && !stat(real, &status)) {
        *folder = status.st_ino;
        found = 1;
    }
out:
    errno = saved;
    return found;
}

static void opened(int fd, int at, const char *path, int flags) {
    struct stat status;
    uint64_t folder;
    char name[NAME_MAX + 1];
    if (fd < 0 || !(flags & (O_CREAT | O_TRUNC)) || (flags & O_TMPFILE) == O_TMPFILE) return;
    if (!tracked(fd, &status) || !S_ISREG(status.st_mode)) return;
    if (flags & O_CREAT && place(at, path, &folder, name))
        put_bytes(LINK, status.st_ino, folder, FILE_KIND, name, strlen(name));
    if (flags & O_TRUNC) put_bytes(TRUNCATE, status.st_ino, 0, 0, NULL, 0);
}

#define OPEN(name)                                                                                                     \
    int name(const char *path, int flags, ...) {                                                                       \
        va_list rest;                                                                                                  \
        va_start(rest, flags);                                                                                         \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;                                        \
        va_end(rest);                                                                                                  \
        int fd = NEXT(name)(path, flags, mode);                                                                        \
        opened(fd, AT_FDCWD, path, flags);                                                                             \
        return fd;                                                                                                     \
    }
#define OPENAT(name)                                                                                                   \
    int name(int at, const char *path, int flags, ...) {                                                               \
        va_list rest;                                                                                                  \
        va_start(rest, flags);                                                                                         \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;                                        \
        va_end(rest);                                                                                                  \
        int fd = NEXT(name)(at, path, flags, mode);                                                                    \
        opened(fd, at, path, flags);                                                                                   \
        return fd;                                                                                                     \
    }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)

int creat(const char *path, mode_t mode) { return open(path, O_CREAT | O_WRONLY | O_TRUNC, mode); }

static void written(int fd, const struct iovec *parts, int count, ssize_t length, off_t offset) {
    struct stat status;
    if (length <= 0 || !tracked(fd, &status)) return;
    int saved = errno;
    if (offset < 0) offset = lseek(fd, 0, SEEK_CUR) - length;
    int synced = (fcntl(fd, F_GETFL) & O_DSYNC) != 0;
    errno = saved;
    put(WRITE, 0, status.st_ino, offset, synced, parts, count, length);
}

ssize_t write(int fd, const void *data, size_t size) {
    ssize_t length = NEXT(write)(fd, data, size);
    written(fd, &(struct iovec){(void *)data, size}, 1, length, -1);
    return length;
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    ssize_t length = NEXT(writev)(fd, parts, count);
    written(fd, parts, count, length, -1);
    return length;
}

#define PWRITE(name, offset_t)                                                                                         \
    ssize_t name(int fd, const void *data, size_t size, offset_t offset) {                                             \
        ssize_t length = NEXT(name)(fd, data, size, offset);                                                           \
        written(fd, &(struct iovec){(void *)data, size}, 1, length, offset);                                           \
        return length;                                                                                                 \
    }
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)

#define PWRITEV(name, offset_t)                                                                                        \
    ssize_t name(int fd, const struct iovec *parts, int count, offset_t offset) {                                      \
        ssize_t length = NEXT(name)(fd, parts, count, offset);                                                         \
        written(fd, parts, count, length, offset);                                                                     \
        return length;                                                                                                 \
    }
PWRITEV(pwritev, off_t)
PWRITEV(pwritev64, off64_t)

/* What the kernel copied from one file to another. */
static void copied(int out, off_t out_offset, int in, off_t in_offset, ssize_t length) {
    struct stat status;
    if (length <= 0 || !tracked(out, &status)) return;
    int saved = errno;
    if (out_offset < 0) out_offset = lseek(out, 0, SEEK_CUR) - length;
    if (in_offset < 0) in_offset = lseek(in, 0, SEEK_CUR) - length;
    char *data = malloc(length);
    for (ssize_t done = 0, read; data && done < length; done += read)
        if ((read = pread(in, data + done, length - done, in_offset + done)) <= 0) {
            memset(data + done, 0, length - done); /* its source has changed meanwhile */
            break;
        }
    put_bytes(WRITE, status.st_ino, out_offset, 0, data, length);
    free(data);
    errno = saved;
}

#define SENDFILE(name, offset_t)                                                                                       \
    ssize_t name(int out, int in, offset_t *offset, size_t size) {                                                     \
        offset_t from = offset ? *offset : -1;                                                                         \
        ssize_t length = NEXT(name)(out, in, offset, size);                                                            \
        copied(out, -1, in, from, length);                                                                             \
        return length;                                                                                                 \
    }
SENDFILE(sendfile, off_t)
SENDFILE(sendfile64, off64_t)

ssize_t copy_file_range(int in, off64_t *in_offset, int out, off64_t *out_offset, size_t size, unsigned flags) {
    off64_t from = in_offset ? *in_offset : -1, to = out_offset ? *out_offset : -1;
    ssize_t length = NEXT(copy_file_range)(in, in_offset, out, out_offset, size, flags);
    copied(out, to, in, from, length);
    return length;
}

static void resized(int fd) {
    struct stat status;
    if (tracked(fd, &status)) put_bytes(TRUNCATE, status.st_ino, status.st_size, 0, NULL, 0);
}

#define FTRUNCATE(name, offset_t)                                                                                      \
    int name(int fd, offset_t size) {                                                                                  \
        int failed = NEXT(name)(fd, size);                                                                             \
        if (!failed) resized(fd);                                                                                      \
        return failed;                                                                                                 \
    }
FTRUNCATE(ftruncate, off_t)
FTRUNCATE(ftruncate64, off64_t)

#define FALLOCATE(name, offset_t)                                                                                      \
    int name(int fd, int mode, offset_t offset, offset_t size) {                                                       \
        int failed = NEXT(name)(fd, mode, offset, size);                                                               \
        if (!failed) resized(fd);                                                                                      \
        return failed;                                                                                                 \
    }
FALLOCATE(fallocate, off_t)
FALLOCATE(fallocate64, off64_t)

#define POSIX_FALLOCATE(name, offset_t)                                                                                \
    int name(int fd, offset_t offset, offset_t size) {                                                                 \
        int failed = NEXT(name)(fd, offset, size);                                                                     \
        if (!failed) resized(fd);                                                                                      \
        return failed;                                                                                                 \
    }
POSIX_FALLOCATE(posix_fallocate, off_t)
POSIX_FALLOCATE(posix_fallocate64, off64_t)

#define TRUNCATE_PATH(name, offset_t)                                                                                  \
    int name(const char *path, offset_t size) {                                                                        \
        int fd = open(path, O_WRONLY | O_CLOEXEC);                                                                     \
        if (fd < 0) return -1;                                                                                         \
        int failed = ftruncate(fd, size), saved = errno;                                                               \
        close(fd);                                                                                                     \
        errno = saved;                                                                                                 \
        return failed;                                                                                                 \
    }
TRUNCATE_PATH(truncate, off_t)
TRUNCATE_PATH(truncate64, off64_t)

#define FSYNC(name)                                                                                                    \
    int name(int fd) {                                                                                                 \
        uint64_t start = sequence ? atomic_load(sequence) : 0;                                                         \
        struct stat status;                                                                                            \
        int failed = NEXT(name)(fd);                                                                                   \
        if (!failed && tracked(fd, &status)) put(SYNC, start, status.st_ino, 0, 0, NULL, 0, 0);                        \
        return failed;                                                                                                 \
    }
FSYNC(fsync)
FSYNC(fdatasync)

void sync(void) {
    uint64_t start = sequence ? atomic_load(sequence) : 0;
    NEXT(sync)();
    if (sequence) put(SYNC_ALL, start, 0, 0, 0, NULL, 0, 0);
}

int syncfs(int fd) {
    uint64_t start = sequence ? atomic_load(sequence) : 0;
    int failed = NEXT(syncfs)(fd);
    if (!failed && sequence) put(SYNC_ALL, start, 0, 0, 0, NULL, 0, 0);
    return failed;
}

static void renamed(uint64_t from_folder, const char *from_name, int to_at, const char *to) {
    uint64_t to_folder;
    struct stat status;
    char names[2 * NAME_MAX + 2], to_name[NAME_MAX + 1];
    if (!place(to_at, to, &to_folder, to_name)) return;
    int saved = errno, missing = fstatat(to_at, to, &status, AT_SYMLINK_NOFOLLOW);
    errno = saved;
    if (missing) return; /* it has been renamed again, or removed, by somebody else */
    size_t length = strlen(from_name);
    memcpy(names, from_name, length + 1);
    snprintf(names + length + 1, NAME_MAX + 1, "%s", to_name);
    put_bytes(RENAME, status.st_ino, from_folder, to_folder, names, length + 1 + strlen(to_name));
}

#define RENAME_CALL(from_at, from, to_at, to, call)                                                                    \
    uint64_t folder;                                                                                                   \
    char name[NAME_MAX + 1];                                                                                           \
    int was_below = place(from_at, from, &folder, name);                                                               \
    int failed = call;                                                                                                 \
    if (!failed && was_below) renamed(folder, name, to_at, to);                                                        \
    return failed;

int rename(const char *from, const char *to) { RENAME_CALL(AT_FDCWD, from, AT_FDCWD, to, NEXT(rename)(from, to)) }

int renameat(int from_at, const char *from, int to_at, const char *to) {
    RENAME_CALL(from_at, from, to_at, to, NEXT(renameat)(from_at, from, to_at, to))
}

int renameat2(int from_at, const char *from, int to_at, const char *to, unsigned flags) {
    RENAME_CALL(from_at, from, to_at, to, NEXT(renameat2)(from_at, from, to_at, to, flags))
}

static void linked(int at, const char *path, int kind) {
    uint64_t folder;
    struct stat status;
    char name[NAME_MAX + 1];
    if (!place(at, path, &folder, name)) return;
    int saved = errno, missing = fstatat(at, path, &status, AT_SYMLINK_NOFOLLOW);
    errno = saved;
    if (!missing) put_bytes(LINK, status.st_ino, folder, kind, name, strlen(name));
}

int linkat(int from_at, const char *from, int to_at, const char *to, int flags) {
    int failed = NEXT(linkat)(from_at, from, to_at, to, flags);
    if (!failed) linked(to_at, to, FILE_KIND);
    return failed;
}

int link(const char *from, const char *to) { return linkat(AT_FDCWD, from, AT_FDCWD, to, 0); }

int mkdirat(int at, const char *path, mode_t mode) {
    int failed = NEXT(mkdirat)(at, path, mode);
    if (!failed) linked(at, path, FOLDER_KIND);
    return failed;
}

int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

int unlinkat(int at, const char *path, int flags) {
    uint64_t folder;
    char name[NAME_MAX + 1];
    int was_below = place(at, path, &folder, name);
    int failed = NEXT(unlinkat)(at, path, flags);
    if (!failed && was_below) put_bytes(UNLINK, 0, folder, 0, name, strlen(name));
    return failed;
}

int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }

int remove(const char *path) {
    int failed = unlink(path);
    return failed && (errno == EISDIR || errno == EPERM) ? rmdir(path) : failed;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = NEXT(clock_gettime)(clock, now);
    if (!failed && clock_error && clock == CLOCK_REALTIME) {
        int64_t wrong = now->tv_sec * 1000000000LL + now->tv_nsec + *clock_error;
        *now = (struct timespec){wrong / 1000000000LL, wrong % 1000000000LL};
    }
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    (void)zone;
    struct timespec found;
    int failed = clock_gettime(CLOCK_REALTIME, &found);
    *now = (struct timeval){found.tv_sec, found.tv_nsec / 1000};
    return failed;
}

time_t time(time_t *where) {
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    if (where) *where = found.tv_sec;
    return found.tv_sec;
}
