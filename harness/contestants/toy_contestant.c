/* Dense attention in plain loops behind harness/c/tfb.h, as somebody might write it, and the same with faults.
 * TOY_LOAD in the environment makes loading it fail: crash, hang, version, list. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "harness/c/tfb.h"

struct TfbLayer {
  char name[32];
  TfbProblem problem;
  float* result;
};

static const char* error = "";

static TfbStatus Fail(TfbStatus status, const char* message) {
  error = message;
  return status;
}

static int LoadsLike(const char* how) {
  const char* wanted = getenv("TOY_LOAD");
  return wanted != NULL && strcmp(wanted, how) == 0;
}

int32_t tfb_interface_version(void) {
  if (LoadsLike("crash")) abort();
  if (LoadsLike("hang")) pause();
  return LoadsLike("version") ? TFB_INTERFACE_VERSION + 1 : TFB_INTERFACE_VERSION;
}

const char* tfb_last_error(void) { return error; }

const char* tfb_techniques(void) {
  if (LoadsLike("list")) return NULL;
  return "[{\"name\": \"dense\", \"title\": \"Loops\", \"definition\": \"dense\"},"
         " {\"name\": \"half\", \"definition\": \"dense:scale=0.5\", \"causal\": [false]},"
         " {\"name\": \"wrong\", \"definition\": \"dense\"},"
         " {\"name\": \"crashes\", \"definition\": \"dense\"},"
         " {\"name\": \"hangs\", \"definition\": \"dense\"},"
         " {\"name\": \"writes_inputs\", \"definition\": \"dense\"},"
         " {\"name\": \"keeps_its_result\", \"definition\": \"dense\"},"
         " {\"name\": \"writes_nothing\", \"definition\": \"dense\"},"
         " {\"name\": \"fails\", \"definition\": \"dense\"},"
         " {\"name\": \"refuses\", \"definition\": \"dense\"},"
         " {\"name\": \"reads_more\", \"definition\": \"dense\"}]";
}

TfbStatus tfb_create(const char* technique, const TfbProblem* problem, const char* device,
                     uint64_t seed, int32_t threads, TfbLayer** layer) {
  (void)device, (void)seed, (void)threads;
  if (strcmp(technique, "refuses") == 0) return Fail(TFB_UNIMPLEMENTED, "not today");
  *layer = malloc(sizeof(TfbLayer));
  snprintf((*layer)->name, sizeof((*layer)->name), "%s", technique);
  (*layer)->problem = *problem;
  (*layer)->result = NULL;
  return TFB_OK;
}

void tfb_destroy(TfbLayer* layer) {
  free(layer->result);
  free(layer);
}

TfbStatus tfb_describe(TfbLayer* layer, const char** json) {
  *json = strcmp(layer->name, "reads_more") == 0
              ? "{\"inputs\": [{\"name\": \"bias\"}], \"parameters\": []}"
              : "{\"inputs\": [{\"name\": \"q\"}, {\"name\": \"k\"}, {\"name\": \"v\"}], "
                "\"parameters\": [], \"about\": {\"toy\": \"1.0\", \"loops\": 3}}";
  return TFB_OK;
}

TfbStatus tfb_workspace_bytes(TfbLayer* layer, size_t* bytes) {
  *bytes = sizeof(double) * (size_t)layer->problem.kv_tokens;
  return TFB_OK;
}

TfbStatus tfb_setup(TfbLayer* layer, const TfbTensor* inputs, size_t input_count, void* workspace,
                    size_t workspace_bytes, void* stream) {
  (void)layer, (void)inputs, (void)input_count, (void)workspace, (void)workspace_bytes,
      (void)stream;
  return TFB_OK;
}

static const DLTensor* Find(const TfbTensor* tensors, size_t count, const char* name) {
  for (size_t n = 0; n < count; ++n) {
    if (strcmp(tensors[n].name, name) == 0) return tensors[n].tensor;
  }
  return NULL;
}

static float* At(const DLTensor* t, int64_t b, int64_t h, int64_t n) {
  return (float*)t->data + b * t->strides[0] + h * t->strides[1] + n * t->strides[2];
}

TfbStatus tfb_run(TfbLayer* layer, const TfbTensor* inputs, size_t input_count,
                  const TfbTensor* outputs, size_t output_count, void* workspace,
                  size_t workspace_bytes, void* stream) {
  (void)workspace_bytes, (void)stream;
  const TfbProblem* p = &layer->problem;
  const DLTensor* q = Find(inputs, input_count, "q");
  const DLTensor* k = Find(inputs, input_count, "k");
  const DLTensor* v = Find(inputs, input_count, "v");
  const DLTensor* out = Find(outputs, output_count, "out");
  double* weights = workspace;
  double scale = 1 / sqrt((double)p->head_dim);
  if (strcmp(layer->name, "half") == 0) scale = 0.5;
  if (strcmp(layer->name, "wrong") == 0) scale *= 1.01;
  if (strcmp(layer->name, "crashes") == 0) abort();
  if (strcmp(layer->name, "hangs") == 0) pause();
  if (strcmp(layer->name, "writes_nothing") == 0) return TFB_OK;
  if (strcmp(layer->name, "writes_inputs") == 0) ((float*)v->data)[0] += 1;
  if (strcmp(layer->name, "fails") == 0) return Fail(TFB_INTERNAL, "the kernel fell over");
  const size_t bytes =
      sizeof(float) * (size_t)(p->batch * p->query_heads * p->query_tokens * p->value_dim);
  if (layer->result != NULL) {
    memcpy(out->data, layer->result, bytes);
    return TFB_OK;
  }
  for (int64_t b = 0; b < p->batch; ++b) {
    for (int64_t h = 0; h < p->query_heads; ++h) {
      const int64_t of = h / (p->query_heads / p->kv_heads);
      for (int64_t i = 0; i < p->query_tokens; ++i) {
        const int64_t end = p->causal ? i + p->kv_tokens - p->query_tokens + 1 : p->kv_tokens;
        double sum = 0;
        for (int64_t j = 0; j < end; ++j) {
          double score = 0;
          for (int64_t c = 0; c < p->head_dim; ++c) {
            score += At(q, b, h, i)[c * q->strides[3]] * (double)At(k, b, of, j)[c * k->strides[3]];
          }
          sum += weights[j] = exp(scale * score);
        }
        for (int64_t c = 0; c < p->value_dim; ++c) {
          double y = 0;
          for (int64_t j = 0; j < end; ++j) {
            y += weights[j] * At(v, b, of, j)[c * v->strides[3]] / sum;
          }
          At(out, b, h, i)[c * out->strides[3]] = (float)y;
        }
      }
    }
  }
  if (strcmp(layer->name, "keeps_its_result") == 0) {
    layer->result = malloc(bytes);
    memcpy(layer->result, out->data, bytes);
  }
  return TFB_OK;
}

TfbStatus tfb_get_parameter(TfbLayer* layer, const char* name, DLTensor* tensor) {
  (void)layer, (void)name, (void)tensor;
  return Fail(TFB_NOT_FOUND, "there are no parameters");
}

TfbStatus tfb_set_parameters(TfbLayer* layer, const TfbTensor* parameters, size_t count) {
  (void)layer, (void)parameters;
  return count == 0 ? TFB_OK : Fail(TFB_INVALID_ARGUMENT, "there are no parameters");
}
