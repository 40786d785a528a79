"""The process that runs SUMO for traffic.py: libsumo has one simulation per process.

It reads pickles from stdin, (name of a method of Simulation, arguments), and answers each on stdout
with (True, result) or (False, message). Its argument is a folder for files of SUMO, which it
removes. It ends when stdin does: with its parent, at the latest. It imports neither gymnasium nor
this package, so it starts quickly.
"""

import heapq
import os
import pickle
import shutil
import sys
import xml.etree.ElementTree as ElementTree

import libsumo
import numpy as np

REACH = 100.0  # metres from a light: lanes are counted that begin or end nearer than that
FAR = 500.0  # metres before a light: up to there the delay of vehicles is that of the light
MAX_LENGTH = 1000.0  # metres of a road from a light to the next one, about
ROUTES = "routes.rou.xml"
TRIPS = "trips.xml"


def write_shifted(source, target, begin, end, shift):
    """Writes a route file whose trips depart `shift` seconds later. Those that would depart at
    `end` or later depart at the beginning: begin + (depart + shift - begin) % (end - begin)."""
    root = ElementTree.parse(source).getroot()
    others = []
    trips = []
    for child in root:
        if child.tag not in ("trip", "vehicle"):
            others.append(child)
            continue
        depart = float(child.get("depart"))
        if begin <= depart < end:
            depart = begin + (depart + shift - begin) % (end - begin)
            child.set("depart", f"{depart:.2f}")
            trips.append((depart, len(trips), child))
    root[:] = others + [child for _, _, child in sorted(trips)]
    ElementTree.ElementTree(root).write(target)


def read_trips(path):
    """{"cost": mean delay (s), "arrived", "unfinished": numbers of trips}, from SUMO's tripinfo
    file."""
    delay = 0.0
    arrived = 0
    unfinished = 0
    for _, trip in ElementTree.iterparse(path):
        if trip.tag != "tripinfo":
            continue
        delay += float(trip.get("timeLoss")) + float(trip.get("departDelay"))
        if float(trip.get("arrival")) >= 0:
            arrived += 1
        else:
            unfinished += 1
        trip.clear()
    cost = delay / max(arrived + unfinished, 1)
    return {"cost": cost, "arrived": arrived, "unfinished": unfinished}


def neighbours():
    """({lane: lanes that vehicles come from}, {lane: lanes that they may go to}), of all lanes."""
    before = {}
    after = {}
    for lane in libsumo.lane.getIDList():
        if lane.startswith(":"):
            continue
        after[lane] = [link[0] for link in libsumo.lane.getLinks(lane)]
        for next_lane in after[lane]:
            before.setdefault(next_lane, []).append(lane)
    return before, after


def lanes_within_reach(lane, neighbours, excluded, reach=REACH):
    """The lane and, while they are shorter than `reach` together, neighbours of the last one, but
    none of those `excluded`."""
    found = {}  # lane: metres up to its other end
    queue = [(0.0, lane)]
    while queue:
        metres, lane = heapq.heappop(queue)
        if lane in found:
            continue
        found[lane] = metres + libsumo.lane.getLength(lane)
        if found[lane] < reach:
            for other in neighbours.get(lane, []):
                if other not in excluded:
                    heapq.heappush(queue, (found[lane], other))
    return list(found)


class Simulation:
    """One simulation at a time. Lights, lanes and roads are those of the map of the first start."""

    def __init__(self, folder):
        self.folder = folder
        self.lights = None
        self.is_running = False

    def start(self, net, routes, begin, end, shift, seed, scale, options, all_lanes):
        """Begins a simulation. With `all_lanes` the counts are those of all lanes of the map too.
        Returns counts()."""
        self.finish()
        if shift:
            shifted = os.path.join(self.folder, ROUTES)
            write_shifted(routes, shifted, begin, end, shift)
            routes = shifted
        command = ["sumo", "-n", net, "-r", routes, "-b", str(begin), "--seed", str(seed)]
        command += ["--scale", str(scale), "--tripinfo-output", os.path.join(self.folder, TRIPS)]
        libsumo.start(command + options)
        self.is_running = True
        self.now = begin
        self.all_lanes = all_lanes
        if self.lights is None:
            self.read_map()
        return self.counts()

    def read_map(self):
        """Keeps the lights of the map, the lanes at them and the roads between them."""
        self.lights = list(libsumo.trafficlight.getIDList())
        self.links = []  # of each light, for each of its signals, (lane in, lane out) pairs
        for light in self.lights:
            signals = []
            for links in libsumo.trafficlight.getControlledLinks(light):
                signals.append([link[:2] for link in links if not link[0].startswith(":")])
            self.links.append(signals)
        self.find_lanes()
        self.roads = self.find_roads()
        self.edges = {}
        for _, _, _, edges in self.roads:
            for edge in edges:
                self.edges.setdefault(edge, len(self.edges))

    def find_lanes(self):
        """Keeps `approach` {lane to a light: lanes that lead to it, itself included}, `upstream`,
        the same with lanes up to FAR, `exit` {lane from a light: lanes that it leads to}, `lanes`,
        the row of each of them, and `entries` {edge at which vehicles may enter: row}."""
        before, after = neighbours()
        ends = set()  # lanes to a light
        starts = set()  # lanes from one
        for signals in self.links:
            for pairs in signals:
                for lane_in, lane_out in pairs:
                    ends.add(lane_in)
                    starts.add(lane_out)
        self.approach = {lane: lanes_within_reach(lane, before, ends) for lane in sorted(ends)}
        self.upstream = {
            lane: lanes_within_reach(lane, before, ends, FAR) for lane in self.approach
        }
        for lane in ends:
            after[lane] = []  # a light is at its end
        self.exit = {lane: lanes_within_reach(lane, after, set()) for lane in sorted(starts)}
        self.lanes = {}
        for ways in (self.approach, self.exit, self.upstream):
            for lanes in ways.values():
                for lane in lanes:
                    self.lanes.setdefault(lane, len(self.lanes))
        self.entries = {}
        for lane, row in self.lanes.items():
            if not before.get(lane):
                self.entries[libsumo.lane.getEdgeID(lane)] = row

    def find_roads(self):
        """[(light, next light, metres, edges)]: the shortest way to each light that is next."""
        light_at = {}  # of an edge that goes to a light
        for i, signals in enumerate(self.links):
            for pairs in signals:
                for lane, _ in pairs:
                    light_at[libsumo.lane.getEdgeID(lane)] = i
        roads = []
        for i, signals in enumerate(self.links):
            lanes = {out for pairs in signals for _, out in pairs}
            edges = {libsumo.lane.getEdgeID(lane) for lane in lanes}
            found = self.next_lights(sorted(edges), light_at)
            for j in sorted(found):
                if j != i:
                    roads.append((i, j, *found[j]))
        return roads

    def next_lights(self, edges, light_at):
        """{light: (metres, edges)} of the lights that are reached from `edges` by way of no other
        light."""
        found = {}
        seen = set()
        queue = [(0.0, [edge]) for edge in edges]  # metres before the last edge
        while queue:
            metres, way = heapq.heappop(queue)
            edge = way[-1]
            if edge in seen:
                continue
            seen.add(edge)
            metres += libsumo.lane.getLength(f"{edge}_0")
            if edge in light_at:
                found.setdefault(light_at[edge], (metres, way))
            elif metres < MAX_LENGTH:
                for next_edge in self.edges_after(edge):
                    heapq.heappush(queue, (metres, [*way, next_edge]))
        return found

    def edges_after(self, edge):
        """The edges that vehicles may go to from an edge, sorted."""
        after = set()
        for k in range(libsumo.edge.getLaneNumber(edge)):
            for link in libsumo.lane.getLinks(f"{edge}_{k}"):
                after.add(libsumo.lane.getEdgeID(link[0]))
        return sorted(after)

    def read_lights(self):
        """What does not change: dict of the lights' names, programs, links and lanes, the lengths
        (m) of the lanes, and the roads, each (light, next light, metres, lanes, rows of edges)."""
        programs = []
        for light in self.lights:
            logic = libsumo.trafficlight.getAllProgramLogics(light)[0]
            programs.append([phase.state for phase in logic.phases])
        roads = []
        for i, j, metres, edges in self.roads:
            rows = [self.edges[edge] for edge in edges]
            lanes = libsumo.edge.getLaneNumber(edges[-1])
            roads.append((i, j, metres, lanes, rows))
        return {
            "names": self.lights,
            "programs": programs,
            "links": self.links,
            "approach": self.approach,
            "upstream": self.upstream,
            "exit": self.exit,
            "lanes": self.lanes,
            "lengths": [libsumo.lane.getLength(lane) for lane in self.lanes],
            "roads": roads,
            "num_edges": len(self.edges),
        }

    def read_shapes(self):
        """{lane: its points (x, y) in metres} of all lanes of the map, those on junctions too."""
        shapes = {}
        for lane in libsumo.lane.getIDList():
            shapes[lane] = np.array(libsumo.lane.getShape(lane))
        return shapes

    def states(self):
        """The states of all lights, a letter for each signal."""
        return [libsumo.trafficlight.getRedYellowGreenState(light) for light in self.lights]

    def follow_programs(self):
        """From now on the lights follow the programs of the map."""
        for light in self.lights:
            logic = libsumo.trafficlight.getAllProgramLogics(light)[0]
            libsumo.trafficlight.setProgram(light, logic.programID)

    def set_states(self, states):
        for light, state in states.items():
            libsumo.trafficlight.setRedYellowGreenState(self.lights[light], state)

    def step(self, yellow, green, yellow_seconds, seconds):
        """Shows the states `yellow` {light: state}, after yellow_seconds, or at once if no light is
        to show yellow, those of `green`, and goes on until `seconds` have passed. Returns
        counts()."""
        self.set_states(yellow)
        if yellow and yellow_seconds:
            libsumo.simulationStep(self.now + yellow_seconds)
        self.set_states(green)
        self.now += seconds
        libsumo.simulationStep(self.now)
        return self.counts()

    def counts(self):
        """Of the present moment: dict of "lanes" [4, lanes], vehicles, halting ones, seconds that
        they wait, and vehicles times the share of the allowed speed that they lack, with those that
        wait to enter; "roads" [2, edges], vehicles and halting ones; with all_lanes "all" {lane:
        (vehicles, halting)} where there are any."""
        vehicles = libsumo.lane.getLastStepVehicleNumber
        halting = libsumo.lane.getLastStepHaltingNumber
        lanes = np.zeros((4, len(self.lanes)))
        for lane, k in self.lanes.items():
            num = vehicles(lane)
            if num:
                lanes[0, k] = num
                lanes[1, k] = halting(lane)
                lanes[2, k] = libsumo.lane.getWaitingTime(lane)
                speed = libsumo.lane.getLastStepMeanSpeed(lane)
                lanes[3, k] = num * max(1 - speed / libsumo.lane.getMaxSpeed(lane), 0)
        for edge, k in self.entries.items():
            lanes[3, k] += len(libsumo.edge.getPendingVehicles(edge))
        roads = np.zeros((2, len(self.edges)))
        for edge, k in self.edges.items():
            num = libsumo.edge.getLastStepVehicleNumber(edge)
            if num:
                roads[0, k] = num
                roads[1, k] = libsumo.edge.getLastStepHaltingNumber(edge)
        result = {"lanes": lanes, "roads": roads}
        if self.all_lanes:
            result["all"] = {}
            for lane in libsumo.lane.getIDList():
                if vehicles(lane):
                    result["all"][lane] = (vehicles(lane), halting(lane))
        return result

    def finish(self):
        """Ends the simulation if there is one. Returns read_trips() of it."""
        if not self.is_running:
            return None
        self.is_running = False
        libsumo.close()
        return read_trips(os.path.join(self.folder, TRIPS))


def main(folder):
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what SUMO prints is no answer
    simulation = Simulation(folder)
    while True:
        try:
            name, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            break
        try:
            answer = True, getattr(simulation, name)(*arguments)
        except Exception as error:  # of many kinds
            answer = False, f"{type(error).__name__}: {error}"
        pickle.dump(answer, answers)
        answers.flush()
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
