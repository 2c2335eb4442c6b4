/* A disk that fails, or forgets, when it is told to. Preloaded into a server (LD_PRELOAD), it looks at every
 * write and every sync of files in the directory $FAILING_DISK, but for shared memory.
 *
 *   $FAILING_DISK_ERROR    a file; while it holds "CALL ERRNO NAME", say "sync 5 -wal", calls for files whose
 *                          name ends like that fail
 *   $FAILING_DISK_KILL     "CALL N NAME": kills the process at the Nth such call; a write is half done
 *   $FAILING_DISK_SHADOW   a directory; a file's content gets there when it is synced, and not before. So it
 *                          has what a power failure leaves at worst. Renaming and removing count at once.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#define PAGE 4096
#define PAGES 65536
#define FILES 16

#define REAL(result, name, ...) ((result (*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name))

struct tracked {
    char name[256];
    unsigned char dirty[PAGES];
};

static struct tracked files[FILES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* The name of a path within the directory, or NULL if it is none of ours. */
static const char *own_name(const char *path) {
    const char *directory = getenv("FAILING_DISK");
    size_t size = directory ? strlen(directory) : 0;
    if (!size || strncmp(path, directory, size) || path[size] != '/') return NULL;
    const char *name = path + size + 1;
    size_t length = strlen(name);
    if (strchr(name, '/') || length > 200 || (length > 4 && !strcmp(name + length - 4, "-shm"))) return NULL;
    return name;
}

static int name_of(int descriptor, char *name) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size < 0) return 0;
    path[size] = 0;
    const char *found = own_name(path);
    if (found) strcpy(name, found);
    return found != NULL;
}

static int ends(const char *name, const char *end) {
    size_t a = strlen(name), b = strlen(end);
    return a >= b && !strcmp(name + a - b, end);
}

static int error_of(const char *call, const char *name) {
    const char *order = getenv("FAILING_DISK_ERROR");
    char wanted[16] = "", end[64] = "";
    int number = 0;
    FILE *file = order ? fopen(order, "r") : NULL;
    if (!file) return 0;
    if (fscanf(file, "%15s %d %63s", wanted, &number, end) < 2 || strcmp(wanted, call) || !ends(name, end)) number = 0;
    fclose(file);
    return number;
}

static int is_time_to_die(const char *call, const char *name) {
    static long count;
    const char *order = getenv("FAILING_DISK_KILL");
    char wanted[16] = "", end[64] = "";
    long number = 0;
    return order && sscanf(order, "%15s %ld %63s", wanted, &number, end) >= 2 && !strcmp(wanted, call) &&
           ends(name, end) && ++count == number;
}

static int shadow_path(const char *name, char *path) {
    const char *directory = getenv("FAILING_DISK_SHADOW");
    if (!directory) return 0;
    snprintf(path, 4096, "%s/%s", directory, name);
    return 1;
}

static struct tracked *track(const char *name) {
    struct tracked *unused = NULL;
    for (int i = 0; i < FILES; i++) {
        if (!strcmp(files[i].name, name)) return &files[i];
        if (!unused && !files[i].name[0]) unused = &files[i];
    }
    if (!unused) abort();
    strcpy(unused->name, name);
    return unused;
}

/* Brings the shadow of a file up to date where it is dirty. */
static void settle(const char *name) {
    char path[4096], source[4096], page[PAGE];
    if (!shadow_path(name, path)) return;
    snprintf(source, sizeof source, "%s/%s", getenv("FAILING_DISK"), name);
    int from = open(source, O_RDONLY | O_CLOEXEC), to = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (from < 0 || to < 0) abort();
    struct tracked *file = track(name);
    for (long number = 0; number < PAGES; number++) {
        if (!file->dirty[number]) continue;
        ssize_t size = pread(from, page, PAGE, number * PAGE);
        if (size > 0 && REAL(ssize_t, pwrite64, int, const void *, size_t, off64_t)(to, page, size, number * PAGE) != size) abort();
        file->dirty[number] = 0;
    }
    struct stat status;
    if (fstat(from, &status) || REAL(int, ftruncate64, int, off64_t)(to, status.st_size)) abort();
    close(from);
    close(to);
}

ssize_t pwrite64(int descriptor, const void *content, size_t size, off64_t at) {
    char name[256];
    if (name_of(descriptor, name)) {
        int error = error_of("write", name);
        if (error) {
            errno = error;
            return -1;
        }
        pthread_mutex_lock(&lock);
        struct tracked *file = track(name);
        for (long number = at / PAGE; number <= (long)(at + size - 1) / PAGE && number < PAGES; number++) file->dirty[number] = 1;
        if (is_time_to_die("write", name)) {
            if (REAL(ssize_t, pwrite64, int, const void *, size_t, off64_t)(descriptor, content, size / 2, at) < 0) abort();
            kill(getpid(), SIGKILL);
        }
        pthread_mutex_unlock(&lock);
    }
    return REAL(ssize_t, pwrite64, int, const void *, size_t, off64_t)(descriptor, content, size, at);
}

ssize_t pwrite(int descriptor, const void *content, size_t size, off_t at) {
    return pwrite64(descriptor, content, size, at);
}

static int sync_with(int (*real)(int), int descriptor) {
    char name[256];
    if (!name_of(descriptor, name)) return real(descriptor);
    int error = error_of("sync", name);
    pthread_mutex_lock(&lock);
    if (error) {
        /* As the kernel does: what could not be written counts as written from now on. */
        memset(track(name)->dirty, 0, PAGES);
        pthread_mutex_unlock(&lock);
        errno = error;
        return -1;
    }
    if (is_time_to_die("sync", name)) kill(getpid(), SIGKILL);
    settle(name);
    pthread_mutex_unlock(&lock);
    return real(descriptor);
}

int fsync(int descriptor) { return sync_with(REAL(int, fsync, int), descriptor); }

int fdatasync(int descriptor) { return sync_with(REAL(int, fdatasync, int), descriptor); }

int unlink(const char *path) {
    char shadow[4096];
    const char *name = own_name(path);
    int done = REAL(int, unlink, const char *)(path);
    if (!done && name && shadow_path(name, shadow)) {
        pthread_mutex_lock(&lock);
        memset(track(name)->dirty, 0, PAGES);
        pthread_mutex_unlock(&lock);
        REAL(int, unlink, const char *)(shadow);
    }
    return done;
}

int rename(const char *from, const char *to) {
    char old[4096], new[4096];
    int done = REAL(int, rename, const char *, const char *)(from, to);
    if (!done && own_name(from) && own_name(to) && shadow_path(own_name(from), old) && shadow_path(own_name(to), new)) {
        pthread_mutex_lock(&lock);
        memcpy(track(own_name(to))->dirty, track(own_name(from))->dirty, PAGES);
        memset(track(own_name(from))->dirty, 0, PAGES);
        pthread_mutex_unlock(&lock);
        REAL(int, rename, const char *, const char *)(old, new);
    }
    return done;
}
