import { useMutation, useQueryClient } from "@tanstack/react-query";
import { describeError } from "../api/client";
import { deleteModel, type ListedModel, refreshModels, shortName } from "../api/manage";
import { formatBytes } from "../lib/format";
import { Button } from "../ui/Button";
import { Dialog } from "../ui/Dialog";
import { Notice } from "../ui/Notice";

/** Asks before a model is deleted. */
export function DeleteDialog({ model, onClose }: { model: ListedModel; onClose: () => void }) {
  const queries = useQueryClient();
  const remove = useMutation({
    mutationFn: () => deleteModel(model.name),
    onSuccess: async () => {
      await refreshModels(queries);
      onClose();
    },
  });
  const name = shortName(model.name);
  return (
    <Dialog
      open
      title={`Delete ${name}?`}
      onClose={onClose}
      actions={
        <>
          <Button onClick={onClose}>Keep it</Button>
          <Button kind="danger" onClick={() => remove.mutate()} disabled={remove.isPending}>
            Delete {name}
          </Button>
        </>
      }
    >
      <p>
        Its name goes, and its file of {formatBytes(model.size)} too, unless another name uses it or it lies outside
        mlxr's folder. It can be pulled again.
      </p>
      {remove.error && <Notice kind="error">{describeError(remove.error)}</Notice>}
    </Dialog>
  );
}
